"""What people type is what they mean: ~ is their home, and a name that looks like a number is a name."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from forks import run_python

from grpo_mega.config.load import compose_config
from grpo_mega.config.typed import as_meant, at_home
from grpo_mega.errors import ConfigError

HOME = os.path.expanduser("~")
TINY = ["experiment=tiny", "layout=single"]


@pytest.mark.parametrize("name", ["1.10", "2026_01_15", "1e3", "true", "7", "0x10", "-1", "inf", "tiny", "a-b"])
def test_a_name_is_text(name: str) -> None:
    config = compose_config(
        [*TINY, f"run.name={name}", f"++data.sources.a.split={name}", "run.followed_problems=3"], checked=False
    )
    assert (config.run.name, config.data.sources["a"].split) == (name, name)
    assert config.run.followed_problems == 3


def test_null_is_none_where_a_setting_may_be() -> None:
    assert compose_config([*TINY, "run.init_from=null"]).run.init_from is None


@pytest.mark.parametrize("typed", ["run.root=~/runs", "run.root='~/runs'", 'run.root="~/runs"'])
def test_home_is_home_in_settings(typed: str) -> None:
    assert compose_config([*TINY, typed]).run.root == f"{HOME}/runs"


def test_home_is_home_in_lists_sources_and_folders_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, '
        '"num_hidden_layers": 3, "intermediate_size": 96, "max_position_embeddings": 512, "vocab_size": 40}'
    )
    (tmp_path / "llama" / "tokenizer.json").write_text("{}")
    words = ["experiment=own_model", "run.init_from=~/llama", "+data.sources.a.path=~/a.jsonl", "sft.path='~/b.jsonl'"]
    config = compose_config(words, checked=False)
    assert (config.run.init_from, config.model.layers) == (f"{tmp_path}/llama", 3)
    assert (config.data.tokenizer, config.data.sources["a"].path) == (f"{tmp_path}/llama", f"{tmp_path}/a.jsonl")
    assert config.sft.path == f"{tmp_path}/b.jsonl"
    assert as_meant(["pairs.path=[~/a,~/b,c~/d]"]) == [f"pairs.path=[{tmp_path}/a,{tmp_path}/b,c~/d]"]


def test_what_is_no_path_stays() -> None:
    words = ["~reward.model", "data.system='about, ~/x'", "data.question=a ~ b", "--out=a~/b", "--reward", "~x=3"]
    assert as_meant(words) == words
    assert as_meant(["--model=~/llama"]) == [f"--model={HOME}/llama"]
    tree = {"a": ["~/x", "~", "~user", "x ~/y", 3, None], "b": {"c": "~/z"}}
    assert at_home(tree) == {"a": [f"{HOME}/x", HOME, "~user", "x ~/y", 3, None], "b": {"c": f"{HOME}/z"}}


def test_no_limit_on_tokens_is_written_as_zero() -> None:
    with pytest.raises(ConfigError, match=re.escape("choose a value in [0, inf) (0 samples among all")):
        compose_config([*TINY, "rollout.top_k=-1"])


@pytest.mark.parametrize(
    ("words", "undecided"),
    [
        ([], True),
        (["layout.tp=1"], False),
        (["layout.tp=2"], False),
        (["layout.micro_batch_tokens=4096"], True),
        (["layout=auto", "layout.tp=1"], False),
        (["layout.auto=true", "layout.pp=1"], True),
    ],
)
def test_a_size_that_is_typed_is_one_that_is_chosen(words: list[str], undecided: bool) -> None:
    own = ["experiment=own_model", "model=qwen3_30b_a3b", "model.context=4096"]
    assert compose_config([*own, *words], checked=False).layout.undecided == undecided


@pytest.mark.parametrize("command", ["tools/plan.py", "tools/simulate.py", "-m grpo_mega.new"])
@pytest.mark.parametrize("typed", ["--answer-tokens 64", "--answer-tokens=64"])
def test_an_option_that_has_another_name_is_refused_with_it(command: str, typed: str) -> None:
    done = run_python(*command.split(), "tiny", *typed.split())
    assert (done.returncode, done.stdout) == (2, "")
    usage, said = done.stderr.rsplit("error: ", 1)
    assert said == "--answer-tokens is now --completion-tokens\n"
    assert ("--completion-tokens" in usage, "--answer-tokens" in usage) == (True, False)


@pytest.mark.long
def test_the_entry_point_reads_words_as_every_tool_does() -> None:
    words = ["experiment=own_model", "run.name=1.10", "run.root=~/runs", "layout.tp=1", "reward=mine:score"]
    shown = run_python("-m", "grpo_mega.train", *words, "model=qwen3_30b_a3b", "--cfg", "job").stdout
    for line in ("name: '1.10'", f"root: {HOME}/runs", "auto: false", "function: mine:score", "success: score"):
        assert f"  {line}\n" in shown, line
