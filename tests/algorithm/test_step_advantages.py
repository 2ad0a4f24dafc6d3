"""The advantages of a step: groups whose samples lack scores, and what is normalised over the batch."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.algorithm.advantage import group_advantages
from grpo_mega.algorithm.step_advantages import (
    AdvantageOptions,
    groups_with_signal,
    process_supervision,
    step_advantages,
)
from grpo_mega.types import Group, Prompt, SampleInfo, Score

PROMPT = Prompt("p", (1,), "", "", "")
OPTIONS = [
    AdvantageOptions(),
    AdvantageOptions(std="population", drop=True),
    AdvantageOptions("leave_one_out", "none"),
    AdvantageOptions("optimal", "none"),
    AdvantageOptions(std="mean"),
    AdvantageOptions(std="batch"),
    AdvantageOptions(std="batch", drop=True),
    AdvantageOptions("leave_one_out", "batch_rewards"),
    AdvantageOptions(std="batch_rewards", drop=True),
    AdvantageOptions(terms={"a": 1.0, "b": 0.5}),
    AdvantageOptions(terms={"a": 1.0, "b": 0.5}, drop=True),
]
"""Every kind of advantage that is relative to the group."""
BATCH = [AdvantageOptions("batch", "batch"), AdvantageOptions("batch", "none")]

rewards_of_a_group = st.lists(st.none() | st.integers(0, 3), min_size=2, max_size=6)
steps = st.lists(rewards_of_a_group, min_size=1, max_size=5)


def group(rewards: list[float | None], lengths: list[int] | None = None, b: list[float] | None = None) -> Group:
    """Samples with these rewards, None where there is no score; terms a and b add up to them with weights 1 and 0.5."""
    b = b or [0.0] * len(rewards)
    scores = [
        Score(0.0, {}, unscorable="the judge did not answer")
        if r is None
        else Score(r + y / 2, {"a": float(r), "b": y})
        for r, y in zip(rewards, b, strict=True)
    ]
    lengths = lengths or [5] * len(rewards)
    return Group(PROMPT, tuple(SampleInfo(n, "stop", ((0, 0),), s) for n, s in zip(lengths, scores, strict=True)))


def advantages(groups: list[Group], options: AdvantageOptions) -> torch.Tensor:
    return step_advantages(groups, groups_with_signal(groups, options), options)


def split(groups: list[Group], options: AdvantageOptions) -> list[list[float]]:
    return [x.tolist() for x in advantages(groups, options).split([len(g.infos) for g in groups])]


@given(step=steps, options=st.sampled_from(OPTIONS + BATCH))
def test_a_sample_without_a_score_is_as_if_it_had_never_been_sampled(
    step: list[list[float | None]], options: AdvantageOptions
) -> None:
    everybody = [group(rewards, [3 + i for i in range(len(rewards))]) for rewards in step]
    scored = [Group(PROMPT, tuple(a for a in g.infos if not a.score.unscorable)) for g in everybody]
    assert groups_with_signal(everybody, options) == groups_with_signal(scored, options)
    kept = [
        [a for a, r in zip(of, rewards, strict=True) if r is not None]
        for of, rewards in zip(split(everybody, options), step, strict=True)
    ]
    assert kept == split(scored, options)
    for of_group, rewards in zip(split(everybody, options), step, strict=True):
        assert all(a == 0 for a, r in zip(of_group, rewards, strict=True) if r is None)


@given(step=steps, options=st.sampled_from(OPTIONS))
def test_groups_of_equal_rewards_and_of_one_score_have_advantages_of_exactly_zero(
    step: list[list[float | None]], options: AdvantageOptions
) -> None:
    groups = [group(rewards, [3 + i for i in range(len(rewards))]) for rewards in step]
    signal = groups_with_signal(groups, options)
    assert signal == [len({r for r in rewards if r is not None}) > 1 for rewards in step]
    for has, of_group in zip(signal, split(groups, options), strict=True):
        assert any(of_group) == has


@pytest.mark.parametrize("options", OPTIONS + BATCH)
def test_calls_and_their_replies_change_no_advantage(options: AdvantageOptions) -> None:
    """A sample counts once, however many turns it has, and with what it has sampled."""
    plain = group([3.0, 0.0, 1.0], [4, 6, 2])
    replied = replace(plain.infos[0], length=9, given=((1, 3), (4, 7)), calls=2)
    assert split([Group(PROMPT, (replied, *plain.infos[1:]))], options) == split([plain], options)


@given(step=steps, order=st.randoms(use_true_random=False), options=st.sampled_from(OPTIONS + BATCH))
def test_the_order_of_the_groups_does_not_matter(
    step: list[list[float | None]], order, options: AdvantageOptions
) -> None:
    groups = [group(rewards) for rewards in step]
    numbers = list(range(len(groups)))
    order.shuffle(numbers)
    expected = split(groups, options)
    for i, of_group in zip(numbers, split([groups[i] for i in numbers], options), strict=True):
        assert of_group == pytest.approx(expected[i], abs=1e-6)


@given(step=steps, std=st.sampled_from(["batch", "batch_rewards"]), drop=st.booleans())
def test_deviations_over_the_batch(step: list[list[float | None]], std: str, drop: bool) -> None:
    """Of what the definitions say, in plain Python."""
    scored = [[r for r in rewards if r is not None] for rewards in step]
    centred = [[r - statistics.fmean(rs) for r in rs] if len(rs) > 1 else [0.0] * len(rs) for rs in scored]
    counted = [i for i, rs in enumerate(scored) if not drop or len(set(rs)) > 1]
    of = [x for i in counted for x in (centred if std == "batch" else scored)[i]]
    deviation = statistics.stdev(of) if len(set(of)) > 1 else 1.0
    got = split([group(rs) for rs in scored], AdvantageOptions(std=std, drop=drop))
    for values, expected in zip(got, centred, strict=True):
        assert values == pytest.approx([x / deviation for x in expected], abs=1e-5)


@given(step=steps)
def test_the_baseline_of_the_batch_as_in_reinforce_plus_plus(step: list[list[float | None]]) -> None:
    """Every reward less the mean of all, divided by the deviation of all."""
    everything = [float(r) for rewards in step for r in rewards if r is not None]
    got = [a for of in split([group(rewards) for rewards in step], BATCH[0]) for a in of]
    rewards = [r for of in step for r in of]
    if len(set(everything)) < 2:
        assert not any(got)
        return
    mean, deviation = statistics.fmean(everything), statistics.stdev(everything)
    expected = [0.0 if r is None else (r - mean) / deviation for r in rewards]
    assert got == pytest.approx(expected, abs=1e-5)


def test_with_the_baseline_of_the_batch_a_group_of_equal_rewards_moves() -> None:
    groups = [group([1, 1]), group([0, 0])]
    assert groups_with_signal(groups, BATCH[1]) == [True, True]
    assert split(groups, BATCH[1]) == [[0.5, 0.5], [-0.5, -0.5]]
    assert groups_with_signal(groups[:1], BATCH[1]) == [False]


def test_terms_that_are_normalised_apart_tell_sums_apart() -> None:
    """GDPO: sums (0, 1) and (0, 2) collapse for GRPO, whose advantages are those of the sums' order alone."""
    groups = [group([0, 1], b=[0.0, 0.0]), group([0, 1], b=[0.0, 2.0])]
    together = split(groups, AdvantageOptions())
    assert together[0] == pytest.approx(together[1])
    first, second = split(groups, AdvantageOptions(terms={"a": 1.0, "b": 1.0}))
    assert second == pytest.approx([2 * x for x in first])


@given(a=st.lists(st.integers(0, 3), min_size=8, max_size=8), b=st.lists(st.integers(0, 3), min_size=8, max_size=8))
def test_terms_apart_are_the_weighted_sum_of_what_each_would_be(a: list[int], b: list[int]) -> None:
    terms = {"a": 1.0, "b": -0.5}
    groups = [group(a[i : i + 4], b=[float(x) for x in b[i : i + 4]]) for i in (0, 4)]
    sums = torch.cat([
        sum(w * group_advantages(torch.tensor(of[i : i + 4]).double(), "sample").double()
            for of, w in ((a, 1.0), (b, -0.5)))
        for i in (0, 4)
    ])  # fmt: skip
    deviation = sums.std() if sums.std() > 1e-6 else torch.tensor(1.0)
    got = advantages(groups, AdvantageOptions(terms=terms))
    torch.testing.assert_close(got, (sums / deviation).float(), atol=1e-5, rtol=1e-5)


def test_a_term_that_differs_is_a_signal_although_the_sums_are_equal() -> None:
    step = [group([0, 1, 1], b=[2.0, 0.0, 0.0])]
    assert groups_with_signal(step, AdvantageOptions()) == [False]
    assert groups_with_signal(step, AdvantageOptions(terms={"a": 1.0, "b": 0.5})) == [True]


def test_a_group_that_earns_the_mean_of_the_batch_does_not_move() -> None:
    groups = [group([1, 1]), group([0, 2]), group([1, 1, None])]
    assert groups_with_signal(groups, BATCH[1]) == [False, True, False]
    assert split(groups, BATCH[1]) == [[0, 0], [-1, 1], [0, 0, 0]]


@pytest.mark.parametrize(("baseline", "expected"), [("mean", 0.5), ("leave_one_out", 1.0), ("batch", 0.5)])
def test_where_nothing_divides_a_group_of_large_rewards_has_signal(baseline: str, expected: float) -> None:
    groups, options = [group([1e6, 1e6 + 1])], AdvantageOptions(baseline, "none")
    assert groups_with_signal(groups, options) == [True]
    assert split(groups, options) == [[-expected, expected]]
    stepwise = AdvantageOptions(std="none", by_step=True)
    assert groups_with_signal(groups, stepwise) == [True]
    assert [x[0] for x in process_supervision(groups, stepwise, [0, 1])] == [-0.5, 0.5]


@pytest.mark.parametrize("std", ["sample", "population", "mean", "batch", "batch_rewards"])
def test_where_something_divides_their_difference_is_rounding(std: str) -> None:
    """Also where the deviation is that of a batch in which nothing else differs."""
    groups = [group([1e6, 1e6 + 0.5]), group([0, 0])]
    assert groups_with_signal(groups, AdvantageOptions(std=std)) == [False, False]
    assert split(groups, AdvantageOptions(std=std)) == [[0, 0], [0, 0]]


@given(reward=st.floats(0.01, 100), sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_equal_rewards_are_the_mean_of_the_batch(reward: float, sizes: list[int]) -> None:
    """Summed up and divided, 0.1 three times is not 0.1."""
    groups = [group([reward] * size) for size in sizes]
    for options in BATCH:
        assert groups_with_signal(groups, options) == [False] * len(sizes)
        assert not any(map(any, split(groups, options)))


BY_STEP = [AdvantageOptions(std=std, by_step=True) for std in ("sample", "population", "none")]
steps_of_a_sample = st.dictionaries(st.integers(0, 6), st.integers(-2, 2), max_size=4)
stepwise = st.lists(
    st.lists(st.none() | st.tuples(st.integers(0, 3), steps_of_a_sample), min_size=2, max_size=4), max_size=3
)
"""Groups of samples, of which each has a total and steps, or no score."""


def by_step(drawn: list[tuple[int, dict[int, int]] | None], length: int = 7) -> Group:
    scores = [
        Score(0.0, {}, unscorable="away")
        if one is None
        else Score(float(one[0]), {}, steps=tuple((end, float(r)) for end, r in sorted(one[1].items())))
        for one in drawn
    ]
    return Group(PROMPT, tuple(SampleInfo(length, "stop", ((0, 0),), score) for score in scores))


@given(step=stepwise, options=st.sampled_from(BY_STEP), some=st.randoms(use_true_random=False))
def test_tokens_earn_what_the_steps_that_end_at_or_after_them_do(step, options: AdvantageOptions, some) -> None:
    """DeepSeekMath, section 4.1.3, in plain Python; a sample without steps has one, its total at the last token."""
    groups = [by_step(drawn) for drawn in step]
    samples = [one for drawn in step for one in drawn]
    numbers = sorted(some.sample(range(len(samples)), some.randint(0, len(samples))))
    got = process_supervision(groups, options, numbers)
    signal = groups_with_signal(groups, options)
    of_group = [i for i, drawn in enumerate(step) for _ in drawn]
    assert signal == [any(a.any() for a in process_supervision(groups, options, own)) for own in _numbers(step)]
    for number, advantages in zip(numbers, got, strict=True):
        scored = [one for one in step[of_group[number]] if one is not None]
        rewards = [r for total, steps in scored for r in (steps.values() if steps else [total])]
        if samples[number] is None or len(scored) < 2 or len({*rewards}) < 2:
            assert advantages.tolist() == [0.0] * 7
            continue
        mean = statistics.fmean(rewards)
        deviation = {"sample": statistics.stdev, "population": statistics.pstdev, "none": lambda _: 1.0}[options.std]
        total, steps = samples[number]
        expected = [
            sum((r - mean) / deviation(rewards) for end, r in (steps or {6: total}).items() if end >= t)
            for t in range(7)
        ]
        assert advantages.tolist() == pytest.approx(expected, abs=1e-5)


def _numbers(step: list[list]) -> list[list[int]]:
    starts = [sum(map(len, step[:i])) for i in range(len(step))]
    return [list(range(start, start + len(drawn))) for start, drawn in zip(starts, step, strict=True)]


@given(rewards=st.lists(st.none() | st.integers(0, 3), min_size=2, max_size=6), std=st.sampled_from(["sample", "none"]))
def test_without_steps_process_supervision_is_outcome_supervision(rewards: list[int | None], std: str) -> None:
    groups = [group(rewards)]
    (expected,) = split(groups, AdvantageOptions(std=std))
    got = process_supervision(groups, AdvantageOptions(std=std, by_step=True), range(len(rewards)))
    torch.testing.assert_close(torch.stack(got), torch.tensor(expected)[:, None].expand(-1, 5))


def test_a_completion_without_tokens_counts_in_its_group() -> None:
    infos = [SampleInfo(n, "stop", ((0, 0),), Score(r, {})) for n, r in ((0, 1.0), (2, 0.0))]
    got = process_supervision([Group(PROMPT, tuple(infos))], AdvantageOptions(std="none", by_step=True), [0, 1])
    assert [x.tolist() for x in got] == [[], [-0.5, -0.5]]


def test_no_group_and_no_score() -> None:
    for options in OPTIONS + BATCH:
        assert advantages([], options).shape == (0,)
        nothing = [group([None, None])]
        assert groups_with_signal(nothing, options) == [False]
        assert advantages(nothing, options).tolist() == [0.0, 0.0]
