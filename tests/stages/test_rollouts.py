"""Which prompts a step draws for groups without signal: the same ones, whichever groups are complete first."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.config.load import compose_config
from grpo_mega.config.schema import Config
from grpo_mega.stages.rollouts import refill_of
from grpo_mega.stages.step import StepOptions, step_of
from grpo_mega.stages.step_report import chosen_groups
from grpo_mega.types import Group, Prompt, SampleInfo, Score

PROMPTS = 4


@pytest.fixture(scope="module")
def config() -> Config:
    return compose_config(["experiment=tiny", "algorithm=dapo", f"algorithm.prompts_per_step={PROMPTS}"])


def group(number: int, signal: bool) -> Group:
    infos = [SampleInfo(1, "stop", ((0, 0),), Score(float(i * signal), {})) for i in range(2)]
    return Group(Prompt(str(number), (), "", "", "sums"), tuple(infos))


@given(signal=st.lists(st.booleans(), min_size=40, max_size=40), limit=st.integers(1, 10), data=st.data())
def test_they_are_the_first_ones_that_suffice(
    config: Config, signal: list[bool], limit: int, data: st.DataObject
) -> None:
    config = replace(config, algorithm=replace(config.algorithm, refill_limit=limit))
    drawn = PROMPTS

    def take(n: int) -> list[Prompt]:
        nonlocal drawn
        drawn += n
        return [group(number, signal[number]).prompt for number in range(drawn - n, drawn)]

    refill, under_way = refill_of(StepOptions.of(config), take), [*range(PROMPTS)]
    while under_way:
        complete = data.draw(st.lists(st.sampled_from(under_way), min_size=1, unique=True))
        under_way = [number for number in under_way if number not in complete]
        under_way += [int(prompt.id) for prompt in refill([group(number, signal[number]) for number in complete])]
    enough = (n for n in range(PROMPTS, limit * PROMPTS) if sum(signal[:n]) >= PROMPTS)
    assert drawn == next(enough, limit * PROMPTS)


def test_a_group_is_replaced_only_where_the_algorithm_says_so(config: Config) -> None:
    config = replace(config, algorithm=replace(config.algorithm, groups_without_signal="drop"))
    assert not refill_of(StepOptions.of(config), lambda n: [group(0, False).prompt] * n)([group(0, False)])


def test_no_more_are_drawn_than_the_limit_allows(config: Config) -> None:
    config = replace(config, algorithm=replace(config.algorithm, refill_limit=2))
    refill = refill_of(StepOptions.of(config), lambda n: [group(0, False).prompt] * n)
    assert [len(refill([group(0, False)] * count)) for count in (3, 3, 3)] == [3, 1, 0]


@pytest.mark.parametrize(("std", "signal"), [("none", True), ("sample", False)])
def test_what_is_refilled_trained_and_shown_agree_about_large_rewards(config: Config, std: str, signal: bool) -> None:
    """Which are signal where nothing divides their difference (tests/algorithm/test_step_advantages.py)."""
    config = replace(config, algorithm=replace(config.algorithm, advantage_std=std))
    close = [replace(info, score=Score(1e6 + i, {})) for i, info in enumerate(group(0, True).infos)]
    groups = [Group(group(0, True).prompt, tuple(close)), group(1, False)]
    options = StepOptions.of(config)
    added = refill_of(options, lambda n: [group(0, False).prompt] * n)(groups)
    assert len(added) == (1 if signal else 2)
    made = step_of(groups, options, 0)
    assert sorted(i for part in made.mini_batches for i in part.trained) == ([0, 1] if signal else [])
    assert not any(part.left_out for part in made.mini_batches)
    shown = {group for step in range(20) for group in chosen_groups(made.signal, config.run, step)}
    assert shown == ({0} if signal else {0, 1})
