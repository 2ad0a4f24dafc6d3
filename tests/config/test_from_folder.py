"""A Hugging Face folder gives defaults: below experiments and the command line, and shown as any other value."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from forks import run_python
from omegaconf import OmegaConf

from grpo_mega.config.load import compose_config, identity, to_yaml
from grpo_mega.errors import ConfigError, InputError

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 3, "intermediate_size": 96, "max_position_embeddings": 512,
    "vocab_size": 40, "rope_theta": 5e5, "torch_dtype": "bfloat16",
}  # fmt: skip
OWN = ["run.name=own", "run.steps=3", "optimizer.lr=1e-6"]
PROBLEMS = ["data=jsonl", "data.train_path=train.jsonl", "data.test_path=test.jsonl"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_with(tmp_path / "llama")


def folder_with(path: Path, tokenizer: dict[str, Any] | None = None, **changes: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(LLAMA | changes))
    if tokenizer is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return path


def test_a_folder_is_enough(folder: Path) -> None:
    model = compose_config([*OWN, f"run.init_from={folder}"]).model
    assert (model.layers, model.hidden, model.heads, model.kv_heads, model.ffn_hidden) == (3, 64, 4, 2, 96)
    assert (model.context, model.vocab_size, model.rope_base, model.dtype) == (512, 40, 500000, "bf16")
    assert not model.moe.experts


def test_a_folder_with_quotes_and_spaces_in_its_name_is_one_too(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "it's mine (1), 50%", tokenizer={})
    config = compose_config([*OWN, *PROBLEMS, 'run.init_from="' + str(folder) + '"'])
    assert config.model.layers == 3
    assert config.data.tokenizer == str(folder)


def test_the_command_line_overrides_the_folder(folder: Path) -> None:
    changed = ["model.context=128", "model.dtype=fp32", "layout.micro_batch_tokens=256"]
    model = compose_config([*OWN, f"run.init_from={folder}", *changed]).model
    assert (model.layers, model.context, model.dtype) == (3, 128, "fp32")


def test_a_sequence_is_no_longer_than_a_micro_batch_unless_it_is_said(tmp_path: Path) -> None:
    origin = f"run.init_from={folder_with(tmp_path / 'long', max_position_embeddings=131072)}"
    assert compose_config([*OWN, origin]).model.context == 16384
    assert compose_config([*OWN, origin, "layout.micro_batch_tokens=131072"]).model.context == 131072
    with pytest.raises(ConfigError, match=r"model\.context=20000"):
        compose_config([*OWN, origin, "model.context=20000"])


def test_an_experiment_overrides_the_folder_and_the_command_line_overrides_both(folder: Path) -> None:
    """experiment=tiny chooses a model; that of the folder has to be asked for."""
    words = ["experiment=tiny", "base=none", "layout=single", f"run.init_from={folder}"]
    assert compose_config(words).model.layers == 2
    assert not compose_config(words).model.vocab_size
    assert compose_config([*words, "model=from_folder"]).model.layers == 3
    # This one also sets a field of the model.
    files = ["data.train_path=a", "data.test_path=b", "layout=single", "rollout.engine=embedded"]
    large = ["experiment=deepseekmath_7b", "model=from_folder", f"run.init_from={folder}", *files]
    assert compose_config(large).model.context == 2048
    assert compose_config([*large, "model.context=1536"]).model.context == 1536


def test_what_one_folder_said_is_forgotten(folder: Path, tmp_path: Path) -> None:
    other = folder_with(tmp_path / "other", num_hidden_layers=7, rope_theta=None)
    assert compose_config([*OWN, f"run.init_from={folder}"]).model.rope_base == 500000
    assert compose_config([*OWN, f"run.init_from={other}"]).model.layers == 7
    assert compose_config(["experiment=tiny"]).model.layers == 2
    with pytest.raises(ConfigError, match=r"model\.layers: not set; give run\.init_from=FOLDER"):
        compose_config(OWN)


@pytest.mark.parametrize("made", [False, True])
def test_a_folder_that_is_no_model_is_named_when_it_has_to_be_one(made: bool, tmp_path: Path) -> None:
    if made:
        (tmp_path / "checkpoint").mkdir()
    what = "not a Hugging Face folder .*" if made else "does not exist, .*"
    with pytest.raises(InputError, match=rf"run\.init_from=.*checkpoint: {what} model=NAME"):
        compose_config([*OWN, f"run.init_from={tmp_path}/checkpoint"])
    assert compose_config([*OWN, "model=tiny_moe", f"run.init_from={tmp_path}/checkpoint"]).model.layers == 2


def test_a_model_that_is_not_supported_is_refused_when_it_is_asked_for(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "phi", model_type="phi3", architectures=["Phi3ForCausalLM"])
    with pytest.raises(ValueError, match=r"phi/config\.json: model_type=phi3 is not supported"):
        compose_config([*OWN, f"run.init_from={folder}"])


# What tokenizer_config.json holds, settings -> tokenizer ("" for the folder) and template.
TOKENIZERS: list[tuple[dict[str, Any] | None, list[str], str, str]] = [
    ({"chat_template": "{{ messages }}"}, PROBLEMS, "", "chat"),
    ({}, PROBLEMS, "", "{prompt}"),
    ({"chat_template": None}, PROBLEMS, "", "{prompt}"),
    (None, PROBLEMS, "chars", "{prompt}"),
    ({"chat_template": "{{ messages }}"}, [*PROBLEMS, "data.template=Q: {prompt}"], "", "Q: {prompt}"),
    ({"chat_template": "{{ messages }}"}, [*PROBLEMS, "data.tokenizer=chars"], "chars", "{prompt}"),
    ({"chat_template": "{{ messages }}"}, [*PROBLEMS, "data.tokenizer=models/x"], "models/x", "{prompt}"),
    ({"chat_template": "{{ messages }}"}, [*PROBLEMS, "data.tokenizer=${run.init_from}"], "", "chat"),
    ({"chat_template": "{{ messages }}"}, [*PROBLEMS[1:], "data=boxed"], "", "User: "),
    ({"chat_template": "{{ messages }}"}, ["data=chain_sum"], "chars", "{prompt}"),
]


@pytest.mark.parametrize(("content", "words", "tokenizer", "template"), TOKENIZERS, ids=range(len(TOKENIZERS)))
def test_tokenizer_and_template_are_the_folder_s_unless_somebody_says_otherwise(
    content: dict[str, Any] | None, words: list[str], tokenizer: str, template: str, tmp_path: Path
) -> None:
    folder = folder_with(tmp_path / "llama", content)
    said = [word.replace("Q: {prompt}", "'Q: {prompt}'") for word in words]
    data = compose_config([*OWN, f"run.init_from={folder}", *said]).data
    assert data.tokenizer == (tokenizer or str(folder))
    assert data.template.startswith(template)
    assert template == "User: " or data.template == template


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json"])
def test_a_chat_template_may_be_a_file_of_its_own(name: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "llama", tokenizer={})
    (folder / name).write_text("{{ messages }}")
    assert compose_config([*OWN, *PROBLEMS, f"run.init_from={folder}"]).data.template == "chat"


def test_the_command_line_and_the_planner_show_what_the_folder_says(folder: Path) -> None:
    words = [*OWN, f"run.init_from={folder}", "model.context=100"]
    shown = run_python("-m", "grpo_mega.train", *words, "--cfg", "job").stdout
    assert OmegaConf.create(shown).model == OmegaConf.create(to_yaml(compose_config(words))).model
    planned = run_python("tools/plan.py", "tiny_dense", "model=from_folder", "base=none", *words[3:], "--json").stdout
    layer = 64 * (64 + 2 * 32 + 64) + 3 * 64 * 96 + 2 * 64
    assert json.loads(planned)["parameters"] == 2 * 64 * 64 + 3 * layer + 64  # 40 tokens are padded to 64 rows


def test_a_run_that_has_a_checkpoint_keeps_the_model_that_it_began_with(folder: Path, tmp_path: Path) -> None:
    words = [*OWN, f"run.init_from={folder}", f"run.root={tmp_path}/runs"]
    first = compose_config(words)
    path = tmp_path / "runs" / "own"
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(to_yaml(first))
    (folder / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 5}))
    assert compose_config(words).model.layers == 5  # it never got anywhere, and begins anew
    (path / "checkpoints" / "step-000001").mkdir(parents=True)
    assert identity(compose_config(words)) == identity(first)
    (folder / "config.json").write_text("{")
    assert identity(compose_config(words)) == identity(first)
    assert compose_config([*words, "model.dtype=fp32"]).model.dtype == "fp32"
    other = folder_with(tmp_path / "other", num_hidden_layers=7)
    assert compose_config([*words, f"run.init_from={other}"]).model.layers == 7
    (path / "config.yaml").write_text("a: [")
    with pytest.raises(ValueError, match=r"config\.json: not JSON"):
        compose_config(words)


@pytest.fixture
def dated(tmp_path: Path) -> Path:
    folder = folder_with(tmp_path / "dated", tokenizer={})
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%Y') }}{{ thinking }}{{ messages[0].content }}")
    return folder


def test_a_template_that_writes_the_date_writes_that_of_the_runs_beginning(dated: Path, tmp_path: Path) -> None:
    words = [*OWN, *PROBLEMS, f"run.init_from={dated}", f"run.root={tmp_path}", "run.name=mine"]
    days = {datetime.now(UTC).date().isoformat()}
    config = compose_config(words)
    assert config.data.date in days | {datetime.now(UTC).date().isoformat()}
    assert identity(config)["data.date"] == config.data.date
    run = tmp_path / "mine"
    run.mkdir()
    (run / "config.yaml").write_text(to_yaml(replace(config, data=replace(config.data, date="2001-02-03"))))
    assert compose_config(words).data.date == "2001-02-03"
    assert compose_config([*words, "data.date='2002-03-04'"]).data.date == "2002-03-04"
    (run / "config.yaml").write_text(to_yaml(replace(config, data=replace(config.data, date=None))))
    assert compose_config(words).data.date is None, "a run of an earlier release keeps its prompts' clock"


def test_other_runs_have_no_date(dated: Path, tmp_path: Path) -> None:
    plain = folder_with(tmp_path / "plain", tokenizer={"chat_template": "{{ messages[0].content }}"})
    assert compose_config([*OWN, *PROBLEMS, f"run.init_from={plain}"]).data.date is None
    assert compose_config([*OWN, *PROBLEMS, f"run.init_from={dated}", "data.template='Q: {prompt}'"]).data.date is None
    assert compose_config(["experiment=tiny"]).data.date is None


def test_options_of_the_chat_template_are_typed(dated: Path) -> None:
    words = [*OWN, *PROBLEMS, f"run.init_from={dated}"]
    config = compose_config([*words, "data.template_options={thinking: false}"])
    assert config.data.template_options == {"thinking": False}
    assert identity(config)["data.template_options.thinking"] is False
    for wrong, why in (
        ("data.template_options={messages: x}", r"data\.template_options\.messages: given by the data"),
        ("data.date=yesterday", r"data\.date=yesterday: .* write it as YYYY-MM-DD"),
    ):
        with pytest.raises(ConfigError, match=why):
            compose_config([*words, wrong])
    for wrong in ("data.template_options={thinking: false}", "data.date='2025-03-09'"):
        with pytest.raises(ConfigError, match=r"no effect with data\.template='Q: \{prompt\}'"):
            compose_config([*words, "data.template='Q: {prompt}'", wrong])


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (r"{prompt}\n\nUse a box.", "{prompt}\n\nUse a box."),
        (r"<|im_start|>user\n{prompt}<|im_end|>\n", "<|im_start|>user\n{prompt}<|im_end|>\n"),
        (r"a\tb: {prompt}\nplease", "a\tb: {prompt}\nplease"),
        (r"{prompt} $\neq 0$, $\nu$, $\nabla$, \text{x}, $\theta \to \boxed{}$, \tag{1}, \textup{x}, \notag", None),
        (r"{prompt}\nan integer\no answer\tin", "{prompt}\nan integer\no answer\tin"),
        (r"{prompt} \\n", None),
    ],
)
def test_typed_line_breaks_and_tabs_mean_what_they_say_and_latex_stays(dated: Path, typed: str, meant: str) -> None:
    for names in (["template"], ["question", "system"]):
        words = [f"data.{name}='{typed}'" for name in names]
        data = compose_config([*OWN, *PROBLEMS, f"run.init_from={dated}", *words]).data
        assert {getattr(data, name) for name in names} == {meant or typed}


def test_what_a_run_has_begun_with_is_text_when_it_goes_on(
    dated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_MEGA_TEST_SECRET", "hunter2")
    words = [*OWN, *PROBLEMS, f"run.init_from={dated}", f"run.root={tmp_path}", "run.name=mine"]
    run = tmp_path / "mine"
    (run / "checkpoints" / "step-000001").mkdir(parents=True)
    template = "${oc.env:GRPO_MEGA_TEST_SECRET} {prompt}"
    config = compose_config(words)
    (run / "config.yaml").write_text(to_yaml(replace(config, data=replace(config.data, template=template, date=None))))
    assert compose_config(words).data.template == template
