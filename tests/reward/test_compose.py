"""The reward of a run: weighted terms, user functions, errors that name the culprit, and tricks that earn nothing."""

from __future__ import annotations

import math
import re
from array import array
from pathlib import Path

import pytest
from refusals import refused

from grpo_mega.config.schema import RewardConfig, RewardTerm
from grpo_mega.reward.compose import build_reward
from grpo_mega.types import Prompt, Sample, Score


def sample(text: str, answer: str = "19", index: int = 0, finish_reason: str = "stop") -> Sample:
    prompt = Prompt(id="chain_sum/x", token_ids=(1,), text="<bos>3+5+2+9=?", answer=answer, task="chain_sum")
    return Sample(prompt, index, array("i", [2]), array("f", [0.0]), finish_reason, ((0, 0),), text)


def config(*terms: RewardTerm, success: str | None = None) -> RewardConfig:
    return RewardConfig(terms=list(terms), success=success or terms[0].name)


ZERO = build_reward(config(RewardTerm("accuracy"), RewardTerm("format", 0.2)))


def test_total_is_the_weighted_sum_of_the_components():
    scores = ZERO.score(
        [
            sample("<think>3+5+2+9=19</think><answer>19</answer>"),
            sample("<think>3+5+2+9=18</think><answer>18</answer>"),
            sample("19"),
        ]
    )
    assert scores == [
        Score(1.2, {"accuracy": 1.0, "format": 1.0}),
        Score(0.2, {"accuracy": 0.0, "format": 1.0}, "accuracy: '18' is not '19'"),
        Score(
            0.0,
            {"accuracy": 0.0, "format": 0.0},
            "accuracy: the completion is not <think>...</think> <answer>...</answer>",
        ),
    ]
    assert ZERO.score([]) == []


def test_order_is_kept():
    samples = [sample(f"<think>a</think><answer>{i}</answer>", answer=str(i // 2)) for i in range(40)]
    assert [each.terms["accuracy"] for each in ZERO.score(samples)] == [float(i == i // 2) for i in range(40)]


@pytest.mark.parametrize(
    "text",
    [
        "<think>a</think><answer>18</answer><answer>19</answer>",
        "<think>a</think><answer><answer>19</answer></answer>",
        "<think><answer>19</answer></think><answer>18</answer>",
        "<think><answer>19</answer></think>",
        "<think>19</think><answer>18</answer>",
        "<think>19</think><answer></answer>",
        "<think>19</think><answer> </answer>",
        "<answer>19</answer>",
        "19",
        "<think></think><answer>19</answer>",
        "<think>a</think><answer>19",
        "<think>a</think><answer>19</answer><eos>19",
        "<think>a</think><answer>3+5+2+9</answer>",
        "<think>a</think><answer>18=19</answer>",
        "<think>a</think><answer>18 19</answer>",
        "<think>a</think><answer>\uff11\uff19</answer>",
        "<think>a</think><answer>nan</answer>",
        "<think>a</think><answer>inf</answer>",
        "<think>a</think><answer>1e999999999</answer>",
        "<think>a</think><answer>" + "9" * 1_000_000 + "</answer>",
        "<think>a</think><answer>\\boxed{19}</answer>",
    ],
    ids=lambda text: text[:60],
)
def test_tricks_earn_no_accuracy(text: str):
    (score,) = ZERO.score([sample(text)])
    assert score.terms["accuracy"] == 0.0


def test_a_completion_cut_by_length_earns_nothing():
    text = "<think>a</think><answer>19</answer>"
    assert [each.total for each in ZERO.score([sample(text), sample(text, finish_reason="length")])] == [1.2, 0.0]


def test_boxed_needs_no_tags():
    reward = build_reward(config(RewardTerm("boxed", 2.0)))
    texts = [r"so \boxed{19.0}", r"\boxed{18} \boxed{19}", r"\boxed{18=19}", r"\boxed{}", r"\boxed{19", "19"]
    assert [each.total for each in reward.score([sample(text) for text in texts])] == [2.0, 0.0, 0.0, 0.0, 0.0, 0.0]


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of user rewards on the import path."""
    (tmp_path / "user_rewards.py").write_text(
        "import math\n"
        "number = 3\n"
        "def length(sample): return len(sample.text)\n"
        "def short(sample): return len(sample.text) < 5\n"
        "def picky(sample): return {}[sample.text]\n"
        "def value(sample): return {'nan': math.nan, 'inf': math.inf, 'none': None, 'text': '1'}[sample.text]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "user_rewards"


def test_user_function(user_module: str):
    terms = RewardTerm("length", 0.5, f"{user_module}:length"), RewardTerm("short", 1.0, f"{user_module}:short")
    assert build_reward(config(*terms)).score([sample("abc")]) == [Score(2.5, {"length": 3.0, "short": 1.0})]


def test_user_function_replaces_a_built_in(user_module: str):
    reward = build_reward(config(RewardTerm("format", 1.0, f"{user_module}:length")))
    assert reward.score([sample("abc")]) == [Score(3.0, {"format": 3.0})]


def test_user_function_that_raises(user_module: str):
    reward = build_reward(config(RewardTerm("mine", 1.0, f"{user_module}:picky")))
    with pytest.raises(RuntimeError, match=r"'mine', prompt 'chain_sum/x', sample 5: KeyError: 'abc'") as raised:
        reward.score([sample("abc", index=5)])
    assert 'user_rewards.py", line 5, in picky' in str(raised.value)


@pytest.mark.parametrize("value", ["nan", "inf", "none", "text"])
def test_user_function_that_returns_no_number(user_module: str, value: str):
    reward = build_reward(config(RewardTerm("mine", 0.0, f"{user_module}:value"), RewardTerm("format")))
    with pytest.raises(ValueError, match=r"'mine', prompt 'chain_sum/x', sample 2: returned"):
        reward.score([sample(value, index=2)])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module_here:f", "reward term 'mine' | No module named"),
        ("no_such_module_here:f", "reward term 'mine' | add that folder to PYTHONPATH"),
        ("user_rewards:nothing", "reward term 'mine' | cannot import 'user_rewards:nothing'"),
        ("user_rewards:nothing", "reward term 'mine' | correct the name"),
        ("user_rewards.py:half", "reward term 'mine' | leave out .py"),
        ("user_rewards:number", "reward term 'mine' | is a int, not a function"),
    ],
)
def test_paths_that_lead_to_no_function(user_module: str, path: str, message: str):
    with refused(message):
        build_reward(config(RewardTerm("mine", 1.0, path)))


@pytest.mark.parametrize("path", ["user_rewards", "user_rewards:", ":length", "..x:f"])
def test_paths_that_are_none(path: str):
    message = (
        rf"reward.terms\[0\].function='{re.escape(path)}': not an import path; write it as package.module:function"
    )
    with pytest.raises(ValueError, match=message):
        build_reward(config(RewardTerm("mine", 1.0, path)))


def test_unknown_term_lists_the_built_ins():
    words = "not a built-in term.*did you mean accuracy.*accuracy, boxed, stated, format.*package.module:function"
    with pytest.raises(ValueError, match=f"name=acuracy: {words}"):
        build_reward(config(RewardTerm("acuracy")))


def test_duplicate_names():
    with pytest.raises(ValueError, match=r"reward\.terms: 2 terms are named format"):
        build_reward(config(RewardTerm("format"), RewardTerm("format", 2.0)))


def test_no_terms():
    with pytest.raises(ValueError, match=r"reward.terms=\[\]: scores nothing"):
        build_reward(RewardConfig(terms=[]))


def test_success_must_name_a_term():
    with pytest.raises(ValueError, match=r"reward.success=solved: not a term.*format"):
        build_reward(config(RewardTerm("format"), success="solved"))


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_weight_must_be_finite(weight: float):
    with pytest.raises(ValueError, match=r"reward.terms\[0\].weight="):
        build_reward(config(RewardTerm("format", weight)))
