"""Rewards of turns: each is a step of process supervision, and together they are the reward of the sample."""

from __future__ import annotations

from array import array

import pytest
import without_waiting

from grpo_mega.algorithm.step_advantages import AdvantageOptions, process_supervision
from grpo_mega.config.schema import RewardConfig, RewardTerm
from grpo_mega.data.tokenizer import CharTokenizer
from grpo_mega.reward.compose import build_reward
from grpo_mega.reward.verdict import NoVerdict
from grpo_mega.types import Call, Group, Prompt, Sample, SampleInfo

PROMPT = Prompt("p/0", (1,), "?", "5", "sums")


def sample(length: int, given: tuple[tuple[int, int], ...], rewards: list[float | None], reward: float) -> Sample:
    calls = tuple(Call("1", False, one) for one in rewards)
    tokens, logprobs = array("i", [4] * length), array("f", [-1.0] * length)
    text = CharTokenizer().decode([4] * (length - 1))
    return Sample(PROMPT, 0, tokens, logprobs, "stop", ((0, 0),), text, given=given, calls=calls, reward=reward)


@pytest.mark.parametrize(
    ("one", "steps"),
    [
        (sample(12, ((3, 5), (8, 9)), [0.25, -0.5], 1.0), ((2, 0.25), (7, -0.5), (11, 1.25))),
        (sample(12, ((3, 5), (8, 9)), [0.25, -0.5, 1.0], 0.75), ((2, 0.25), (7, -0.5), (11, 1.0))),
        (sample(12, ((3, 5), (8, 9)), [None, 1.0], 1.0), ((2, 0.0), (7, 1.0), (11, 0.0))),
        (sample(4, (), [0.5], 0.5), ((3, 0.5),)),
        (sample(12, ((3, 5),), [None], 1.0), ()),
        (sample(12, (), [], 1.0), ()),
    ],
    ids=["then an answer", "ended by a call", "the first has none", "one call", "no rewards of turns", "no calls"],
)
@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_each_turn_is_a_step(one: Sample, steps: tuple[tuple[int, float], ...], weight: float) -> None:
    reward = build_reward(RewardConfig(terms=[RewardTerm("environment", weight)], success="environment"))
    (score,) = reward.score([one], CharTokenizer().decode)
    assert score.steps == tuple((end, weight * value) for end, value in steps)
    assert score.total == weight * one.reward
    (whole,) = reward.score([one])
    assert whole.steps == ()


def test_the_advantage_of_a_token_is_of_the_turns_that_end_at_it_or_later() -> None:
    """By hand: rewards 1, -1 and 0 have the mean 0 and, divided by 3, the variance 2/3."""
    reward = build_reward(RewardConfig(terms=[RewardTerm("environment", 1.0)], success="environment"))
    samples = [sample(6, ((2, 4),), [1.0, -1.0], 0.0), sample(3, (), [0.0], 0.0)]
    scores = reward.score(samples, CharTokenizer().decode)
    infos = [
        SampleInfo(len(s.token_ids), "stop", ((0, 0),), x, given=s.given) for s, x in zip(samples, scores, strict=True)
    ]
    options = AdvantageOptions("mean", "population", by_step=True)
    two_turns, one_turn = process_supervision([Group(PROMPT, tuple(infos))], options, [0, 1])
    unit = 1.5**0.5
    assert two_turns.tolist() == pytest.approx([0.0, 0.0, -unit, -unit], abs=1e-6)
    assert one_turn.tolist() == [0.0, 0.0, 0.0]


def test_rewards_of_turns_are_those_after_the_calls() -> None:
    path = "made_environments:Paid"
    replies = [without_waiting.reply({}, "k", "s", ["2", "x", "3"][: number + 1], path, 100) for number in range(3)]
    assert [(reply["error"], reply["reward"]) for reply in replies] == [(False, 2.0), (True, 0.0), (False, 3.0)]
    with pytest.raises(NoVerdict, match="finite"):
        without_waiting.reply({}, "nan", "s", ["nan"], path, 100)
    assert without_waiting.reply({}, "none", "s", ["1"], "made_environments:Broken", 100)["reward"] is None
