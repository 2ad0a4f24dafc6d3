"""The checks before a start: all problems are named, and tokens of another run are compared by what they mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from made_tokenizer import write_tokenizer
from refusals import refused
from tokenizers import Tokenizer

from grpo_mega.checks import _check_origin_tokenizer, refuse_all
from grpo_mega.errors import ConfigError, InputError, instead_of
from grpo_mega.models.families.hf_folder import on_hub


def origin_of(folder: Path, tokenizer: Path) -> Path:
    """A checkpoint whose run had this tokenizer."""
    (folder / "origin").mkdir()
    (folder / "origin" / "state.json").write_text(json.dumps({"config": {"data": {"tokenizer": str(tokenizer)}}}))
    return folder / "origin"


def failing(error: Exception) -> None:
    raise error


def test_every_problem_is_named_and_those_of_a_list_one_by_one() -> None:
    one, two, three = (InputError(f"run.{name}=0", "too low", "raise it") for name in "abc")
    checks = [
        ("first", lambda: failing(one)),
        ("fine", lambda: None),
        ("others", lambda: failing(ConfigError([two, three]))),
        ("a damaged file", lambda: failing(KeyError("weight_map"))),
    ]
    with pytest.raises(ConfigError) as error:
        refuse_all(checks)
    assert error.value.problems[:3] == [one, two, three]
    assert [problem.where for problem in error.value.problems[3:]] == ["a damaged file"]
    with refused("run.a=0 | too low"):
        refuse_all(checks[:2])
    refuse_all(checks[1:2])


def test_what_is_not_there_is_told_with_the_names_closest_to_it(tmp_path: Path) -> None:
    for name in ("step-000010", "step-000020", ".step-000030"):
        (tmp_path / "runs" / "tiny" / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "file").touch()
    there = tmp_path / "runs" / "tiny" / "checkpoints"
    assert instead_of(there / "step-000030") in (
        f" ({there}/ has step-000010, step-000020)",
        f" ({there}/ has step-000020, step-000010)",  # equally close
    )
    assert instead_of(tmp_path / "runs" / "tyni" / "checkpoints") == f" ({tmp_path}/runs/ has tiny)"
    for suffix in ("csv", "jsonl", "md", "parquet", "zip"):
        (tmp_path / f"train.{suffix}").touch()
    assert instead_of(tmp_path / "trai.parquet").startswith(f" ({tmp_path}/ has train.parquet, ")
    models = ("Qwen2.5-14B-Instruct", "Qwen2.5-32B-Instruct", "Qwen2.5-7B-Instruct", "Qwen2.5-72B-Instruct", "Qwen3-8B")
    for name in models:
        (tmp_path / "models" / name).mkdir(parents=True)
    assert instead_of(tmp_path / "models" / "Qwen2.5-7B-Instuct").startswith(f" ({tmp_path}/models/ has {models[2]}, ")
    assert instead_of(tmp_path / "models" / "Qwen3-8b").startswith(f" ({tmp_path}/models/ has {models[4]}")
    (tmp_path / "runs" / "gone").symlink_to("nowhere")
    assert instead_of(tmp_path / "runs" / "gone") == ""
    for other in (tmp_path / "file" / "below", there / "x", "nowhere-at-all", "/"):
        assert instead_of(other) == ""


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("Qwen/Qwen3-8B", "`hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B`, then use models/Qwen3-8B"),
        ("models/Qwen3-8B", "`hf download OWNER/Qwen3-8B --local-dir models/Qwen3-8B`, then use models/Qwen3-8B"),
        ("runs/tiny", ""),
        ("data/gsm8k", ""),
        ("/absent/model", ""),
    ],
)
def test_a_missing_model_is_looked_for_on_the_hub_only_under_a_name_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert on_hub(path) == (f"; if it is on the Hugging Face Hub: {command}" if command else "")


def test_a_library_that_is_missing_is_no_problem_of_the_run() -> None:
    with pytest.raises(ImportError):
        refuse_all([("the models", lambda: failing(ImportError("torch")))])


@pytest.mark.parametrize(
    "change",
    [
        lambda made: None,
        lambda made: made.add_tokens(["<one more>"]),
        lambda made: made.add_special_tokens(["<one more>"]),
    ],
    ids=["the same", "one more", "one more special"],
)
def test_tokens_may_be_added_to_those_of_the_origin(tmp_path: Path, change: Callable[[Tokenizer], object]) -> None:
    trained = write_tokenizer(tmp_path / "trained", with_bos=True)
    ours = write_tokenizer(tmp_path / "ours", with_bos=True)
    made = Tokenizer.from_file(str(ours / "tokenizer.json"))
    change(made)
    made.save(str(ours / "tokenizer.json"))
    _check_origin_tokenizer(origin_of(tmp_path, trained), str(ours))


def test_moved_tokens_another_beginning_and_single_characters_are_refused(tmp_path: Path) -> None:
    trained = write_tokenizer(tmp_path / "trained", with_bos=True)
    other = write_tokenizer(tmp_path / "other", with_bos=False)
    moved = write_tokenizer(tmp_path / "moved", with_bos=True)
    content = json.loads((moved / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["y"], vocabulary["z"] = vocabulary["z"], vocabulary["y"]
    (moved / "tokenizer.json").write_text(json.dumps(content))
    origin = origin_of(tmp_path, trained)
    for tokenizer in (str(other), str(moved), "chars"):
        with refused(f"run.init_from={origin} | was trained with data.tokenizer={trained}, whose tokens differ"):
            _check_origin_tokenizer(origin, tokenizer)
