"""What ends a completion: the model's own tokens unless others are named, known before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_tokenizer import write_tokenizer
from refusals import refused

from grpo_mega.data.huggingface import HuggingFaceTokenizer
from grpo_mega.data.model_defaults import stop_ids, unheeded_end
from grpo_mega.data.tokenizer import CharTokenizer

BOS, START, END = 0, 1, 2
"""Ids of the special tokens of made tokenizers."""


def stops(folder: Path, stop: list[str] | None = None, init_from: Path | None = None) -> tuple[int, ...]:
    return stop_ids(stop, HuggingFaceTokenizer(folder, "{prompt}"), (str(folder), init_from and str(init_from)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "tokenizer", with_bos=False)


def generation(folder: Path, content: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_the_toys_tokenizer_ends_with_its_end_of_text() -> None:
    assert stop_ids(None, CharTokenizer(), ("chars", None)) == (CharTokenizer.eos_id,)


def test_the_tokenizers_end_of_text_is_the_default(folder: Path) -> None:
    assert stops(folder) == (END,)


@pytest.mark.parametrize("named", [START, [START], [START, END]])
def test_generation_config_adds_its_own(folder: Path, named: object) -> None:
    generation(folder, {"eos_token_id": named, "temperature": 0.6})
    assert stops(folder) == (START, END)


@pytest.mark.parametrize("content", [{}, {"eos_token_id": None}, {"eos_token_id": []}])
def test_generation_config_may_say_nothing(folder: Path, content: object) -> None:
    assert stops(generation(folder, content)) == (END,)


def test_the_models_folder_counts_as_the_tokenizers_does(folder: Path, tmp_path: Path) -> None:
    assert stops(folder, init_from=generation(tmp_path / "model", {"eos_token_id": BOS})) == (BOS, END)
    assert stops(folder, init_from=tmp_path / "checkpoint") == (END,)


def test_what_is_named_counts_alone(folder: Path) -> None:
    generation(folder, {"eos_token_id": START})
    assert stops(folder, stop=["<bos>"]) == (BOS,)
    assert stops(folder, stop=[]) == ()
    with refused("rollout.stop: '<eos>' | not a token"):
        stops(folder, stop=["<eos>"])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", " | not a JSON object"),
        ([1], " | not a JSON object"),
        ({"eos_token_id": "<|im_end|>"}, ": eos_token_id=['<|im_end|>'] | not a number"),
        ({"eos_token_id": [True]}, ": eos_token_id=[True] | not a number"),
        ({"eos_token_id": 5000}, " | token 5000"),
        ({"eos_token_id": -1}, " | token -1"),
    ],
)
def test_a_generation_config_that_makes_no_sense_is_named(folder: Path, content: object, why: str) -> None:
    generation(folder, content)
    with refused(f"{folder}/generation_config.json{why}") as raised:
        stops(folder)
    assert '"rollout.stop=' in raised.value.fix


def test_a_tokenizer_without_an_end_is_refused(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["eos_token"]
    file.write_text(json.dumps(settings))
    with refused("data.tokenizer= | no token ends a completion"):
        stops(folder)
    assert stops(generation(folder, {"eos_token_id": START})) == (START,)


@pytest.mark.parametrize("named", [START, [START, END]])
def test_config_json_counts_where_generation_config_is_missing(folder: Path, named: object) -> None:
    (folder / "config.json").write_text(json.dumps({"eos_token_id": named}))
    assert stops(folder) == (START, END)
    assert stops(generation(folder, {"eos_token_id": END})) == (END,)


def test_a_turn_that_ends_with_no_stop_token_is_a_warning_with_the_fix(folder: Path) -> None:
    chat = HuggingFaceTokenizer(folder, "chat")
    assert chat.end_of_turn() == END
    assert unheeded_end(None, chat, (END,)) is None
    warning = unheeded_end(None, chat, (BOS,))
    assert warning is not None
    assert """set "rollout.stop=['<bos>', '<|im_end|>']\"""" in warning
    assert unheeded_end(["<bos>"], chat, (BOS,)) is None
    assert HuggingFaceTokenizer(folder, "{prompt}").end_of_turn() is None
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} . {% endfor %}")
    assert HuggingFaceTokenizer(folder, "chat").end_of_turn() is None
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content if m.role == 'user' else raise_exception('no') }}{% endfor %}"
    )
    assert HuggingFaceTokenizer(folder, "chat").end_of_turn() is None
