"""Reward models that a run cannot learn from, by what their training has left."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from grpo_mega.config.load import compose_config
from grpo_mega.data.reward_model_state import check_reward_model_state
from grpo_mega.data.tokenizer import CharTokenizer, fingerprint

WHOLE = {"tokenizer": fingerprint(CharTokenizer()), "pairs": "", "scale": {"mean": 0.0, "std": 1.0}}
STEPS = {"tokenizer": fingerprint(CharTokenizer()), "pairs": "", "separators": [";"]}
RAW = "reward.model.normalize=false"


def check(state: dict[str, Any], *words: str) -> None:
    config = compose_config(["experiment=tiny", "reward.model.path=runs/liked", *words])
    check_reward_model_state(config, Path("runs/liked"), state, CharTokenizer())


@pytest.mark.parametrize(
    ("state", "words"),
    [(WHOLE, []), (WHOLE | {"scale": None}, [RAW]), (WHOLE | {"scale": {"mean": 0.0, "std": 0.0}}, [RAW])]
    + [(STEPS, words) for words in ([], ["algorithm=maxrl"], ["algorithm.supervision=process"])],
)
def test_what_goes_together(state: dict[str, Any], words: list[str]) -> None:
    check(state, *words)


@pytest.mark.parametrize(
    ("state", "words", "message"),
    [
        (WHOLE | {"tokenizer": "another"}, [], "was trained with another tokenizer than data.tokenizer=chars"),
        (STEPS | {"tokenizer": "another"}, [], "was trained with another tokenizer than data.tokenizer=chars"),
        (WHOLE | {"scale": {"mean": 0.0, "std": 0.0}}, [], "gives every response the same score"),
        (WHOLE | {"scale": None}, [], "is of a training that has not ended"),
        (WHOLE, ["algorithm=maxrl"], "algorithm.advantage_std=mean divides by the mean reward of a group"),
        (WHOLE, ["algorithm=maxrl", RAW], "reward.model.path=runs/liked may be, as it scores whole answers; set"),
        (WHOLE, ["algorithm.supervision=process"], "algorithm.supervision=process is about the scores of steps"),
        (WHOLE, ["reward.model.outcome=last"], "reward.model.outcome=last is about the scores of steps"),
    ],
)
def test_what_does_not(state: dict[str, Any], words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check(state, *words)
