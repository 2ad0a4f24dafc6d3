"""The curriculum: exact rates, no problem starves, shares are kept, and a stop in between changes nothing."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from grpo_mega.config.load import compose_config
from grpo_mega.config.schema import Config, DataConfig, ModelConfig, RewardConfig, RunConfig
from grpo_mega.data import build_data
from grpo_mega.data.prompt_order import FrontierSource, Rule, mixture, shares, shuffled_draws
from grpo_mega.errors import ConfigError
from grpo_mega.types import Group, Prompt, SampleInfo, Score


def source(*sizes: int, revisit: int = 4, weights: Sequence[float] = (), identity: str = "x") -> FrontierSource:
    prompts = [[Prompt(f"{s}/{i}", (1,), str(i), str(i), str(s)) for i in range(n)] for s, n in enumerate(sizes)]
    draws = [shuffled_draws(n, f"0/{s}") for s, n in enumerate(sizes)]
    rule = Rule(("absent", "accuracy", "other"), 0.25, 0.75, revisit)
    return FrontierSource(prompts, draws, mixture(shares(weights or [1] * len(sizes))), rule, identity)


def answered(prompt: Prompt, rewards: Sequence[float | None]) -> Group:
    """A group with these accuracies; None for a sample that could not be scored."""
    scores = [
        Score(0.0, {}, unscorable="no service")
        if accuracy is None
        else Score(9.0, {"other": 9.0, "accuracy": accuracy})
        for accuracy in rewards
    ]
    return Group(prompt, tuple(SampleInfo(1, "stop", ((0, 0),), score) for score in scores))


def name(prompt: Prompt) -> str:
    return prompt.id.partition("#")[0]


def step(stream: FrontierSource, n: int, noise: random.Random) -> list[str]:
    """Takes n prompts and reports random outcomes."""
    prompts = stream.take(n)
    stream.learn([answered(prompt, [noise.randint(0, 1) for _ in range(4)]) for prompt in prompts])
    return [prompt.id for prompt in prompts]


def test_solved_and_hopeless_problems_come_in_every_nth_pass_and_the_frontier_in_all() -> None:
    stream = source(40)
    rates = {f"0/{i}": (0.0, 0.5, 1.0, 0.25, 0.75)[i % 5] for i in range(40)}
    first = stream.take(40)
    assert len({name(prompt) for prompt in first}) == 40  # all are new
    stream.learn([answered(prompt, [rates[name(prompt)]] * 4) for prompt in first])
    visits = Counter(name(prompt) for prompt in stream.take(24 * 4 + 16))  # four passes
    assert {visits[one] for one, rate in rates.items() if 0.25 <= rate <= 0.75} == {4}
    assert {visits[one] for one, rate in rates.items() if rate in (0, 1)} == {1}


def test_the_latest_group_decides_and_what_could_not_be_scored_does_not_count() -> None:
    stream = source(1)

    def rate() -> Any:
        return stream.state_dict()["rates"][0][0]

    (prompt,) = stream.take(1)
    assert rate() is None
    stream.learn([answered(prompt, [None, None])])
    assert rate() is None
    stream.learn([answered(prompt, [1, None, 0, 0])])
    assert rate() == 1 / 3
    stream.learn([answered(prompt, [-1, -1])])
    assert rate() == -1


@settings(max_examples=100)
@given(st.lists(st.integers(0, 1), min_size=1, max_size=64))
def test_rates_are_exact(accuracies: list[int]) -> None:
    stream = source(1)
    stream.learn([answered(*stream.take(1), accuracies)])
    assert Fraction(stream.state_dict()["rates"][0][0]) == Fraction(float(Fraction(sum(accuracies), len(accuracies))))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.integers(2, 5), st.integers(0, 99))
def test_no_problem_starves(count: int, revisit: int, seed: int) -> None:
    """Whatever the outcomes are, any pass and the n - 1 before it have every problem."""
    stream, noise = source(count, revisit=revisit), random.Random(seed)
    taken = [one for _ in range(60) for one in step(stream, 3, noise)]
    passes: dict[str, list[int]] = {}
    for one in taken:
        problem, _, epoch = one.partition("#")
        passes.setdefault(problem, []).append(int(epoch))
    last = max(at for of_it in passes.values() for at in of_it)
    assert len(passes) == count
    for of_it in passes.values():
        visits = [-1, *of_it, last]
        assert max(b - a for a, b in pairwise(visits)) <= revisit


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(0, 12), st.integers(0, 99))
def test_a_stop_in_between_changes_nothing(sizes: list[int], before: int, seed: int) -> None:
    one, two, noise = source(*sizes), source(*sizes), random.Random(seed)
    for _ in range(before):
        step(one, 3, noise)
    saved = json.loads(json.dumps(one.state_dict()))
    step(one, 5, random.Random(seed))  # a step that a signal interrupts is undone
    one.load_state_dict(saved)
    two.load_state_dict(saved)
    again, noises = one.state_dict(), [random.Random(7), random.Random(7)]
    assert again == saved == two.state_dict()
    assert [step(one, 3, noises[0]) for _ in range(9)] == [step(two, 3, noises[1]) for _ in range(9)]


def test_a_saved_state_is_not_changed_by_what_follows() -> None:
    stream = source(5)
    saved = stream.state_dict()
    step(stream, 5, random.Random(0))
    assert saved == source(5).state_dict()


def test_sources_keep_their_shares_whatever_is_left_out() -> None:
    stream, noise = source(10, 30, weights=(3, 1)), random.Random(0)
    taken = [one for _ in range(50) for one in step(stream, 8, noise)]
    assert Counter(one[0] for one in taken) == {"0": 300, "1": 100}
    assert len({*taken}) == 400


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"identity": "y"}, "saved prompt order | belongs to 'y', this"),
        ({"cursor": -1}, "cursor | not a number from"),
        ({"positions": [0, -2]}, "positions | not a list of"),
        ({"positions": [0]}, "positions | for 2 sources"),
        ({"positions": [0, True]}, "positions | not a list of"),
        ({"rates": [[None], [None]]}, "rates of source 1 | a pass rate for each of 2 problems"),
        ({"rates": None}, "rates | a list for each of 2 sources"),
        ({"rates": [[None, None]]}, "saved prompt order: rates=[[None, None]] | a list for each of 2 sources"),
        ({"rates": [[None, None], 3]}, "rates of source 2 | rate"),
        ({"rates": [[None, "high"], [None]]}, "rates of source 1, problem 2: 'high' | a finite number"),
        ({"rates": [[None, None], [math.nan]]}, "rates of source 2, problem 1: nan | not a finite number"),
    ],
)
def test_a_damaged_state_and_one_of_other_data_are_refused(wrong: dict[str, Any], message: str) -> None:
    stream = source(2, 1)
    with refused(message):
        stream.load_state_dict(stream.state_dict() | wrong)


def test_it_is_chosen_by_the_configuration_and_follows_the_reward_that_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}=?", "answer": i}) + "\n" for i in range(20)))
    data = DataConfig(task="jsonl", train_path=str(path), validation_size=2, test_size=2, curriculum="frontier")
    config = Config(run=RunConfig(), model=ModelConfig(context=64), data=data, reward=RewardConfig(success="mine"))
    stream = build_data(config).train
    prompts = stream.take(16)
    stream.learn([Group(p, (SampleInfo(1, "stop", ((0, 0),), Score(0.0, {"mine": 1.0})),)) for p in prompts[:12]])
    second = stream.take(7)  # the four that were not answered, and a quarter of the twelve that are solved
    assert {name(prompt) for prompt in prompts[12:]} < {name(prompt) for prompt in second}
    assert {prompt.id.rpartition("#")[2] for prompt in second} == {"1"}
    data.curriculum = "none"
    with pytest.raises(ValueError, match="curriculum=frontier"):
        build_data(config).train.load_state_dict(stream.state_dict())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.curriculum=frontier"], "data.curriculum=frontier: no effect with data.task=chain_sum"),
        (["data.frontier_low=0.95"], "data.frontier_low=0.95: must be at most data.frontier_high=0.9"),
        (["data.frontier_high=nan"], "data.frontier_low=0.1: must be at most"),
        (["data.frontier_revisit=1"], "data.frontier_revisit=1: out of range; choose a value in"),
        (["data.curriculum=fronteir"], "did you mean frontier"),
    ],
)
def test_senseless_settings_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose_config(["experiment=tiny", *words])
