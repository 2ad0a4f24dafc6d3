"""Reward models that a run cannot learn from, by what their training has left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from grpo_mega.config.load import compose_config
from grpo_mega.data.check_models import check_reward_model_state
from grpo_mega.data.tokenizer import CharTokenizer, fingerprint

WHOLE = {"tokenizer": fingerprint(CharTokenizer()), "pairs": "", "scale": {"mean": 0.0, "std": 1.0}}
STEPS = {"tokenizer": fingerprint(CharTokenizer()), "pairs": "", "separators": [";"]}
RAW = "reward.model.normalize=false"


def check(state: dict[str, Any], *words: str) -> None:
    config = compose_config(["experiment=tiny", "reward.model.path=runs/liked", *words])
    check_reward_model_state(Path("runs/liked"), state, CharTokenizer(), config.reward, config.algorithm, config.data)


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
        (WHOLE | {"tokenizer": "another"}, [], "reward.model.path=runs/liked | trained with another tokenizer than"),
        (STEPS | {"tokenizer": "another"}, [], "reward.model.path=runs/liked | trained with another tokenizer than"),
        (WHOLE | {"scale": {"mean": 0.0, "std": 0.0}}, [], "runs/liked | gives every response the same score"),
        (WHOLE | {"scale": None}, [], "runs/liked | has not ended"),
        (WHOLE, ["algorithm=maxrl"], "algorithm.advantage_std=mean | divides by the mean reward of a group"),
        (
            WHOLE,
            ["algorithm=maxrl", RAW],
            "algorithm.advantage_std=mean | scores whole completions",
        ),
        (WHOLE, ["algorithm.supervision=process"], "algorithm.supervision=process | scores of steps"),
        (WHOLE, ["reward.model.outcome=last"], "reward.model.outcome=last | scores of steps"),
    ],
)
def test_what_does_not(state: dict[str, Any], words: list[str], message: str) -> None:
    with refused(message):
        check(state, *words)
