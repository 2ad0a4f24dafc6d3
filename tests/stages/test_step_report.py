"""What a step says of itself: which groups are shown, and metrics of its rewards and lengths."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.config.schema import RunConfig
from grpo_mega.stages.step_report import ages, chosen_groups, rollout_metrics, sample_numbers, staleness
from grpo_mega.types import Group, Prompt, SampleInfo, Score, Step


def chosen(signal: str, count: int, step: int, seed: int = 0) -> list[int]:
    """Groups that are shown of a step; `signal` has a letter for each group, x where it has signal."""
    return chosen_groups([letter == "x" for letter in signal], RunConfig(sample_groups_per_step=count, seed=seed), step)


def test_every_group_with_signal_is_drawn_now_and_then_and_none_without() -> None:
    drawn = Counter(group for step in range(60) for group in chosen("x-x--x", 1, step))
    assert {*drawn} == {0, 2, 5}
    assert min(drawn.values()) > 5


def test_those_without_signal_fill_what_is_left() -> None:
    of = "-x--"
    for step in range(20):
        assert chosen(of, 1, step) == [1]
        assert 1 in chosen(of, 3, step)
        assert len({*chosen(of, 3, step)}) == 3
    assert len({tuple(chosen(of, 2, step)) for step in range(20)}) == 3


def test_a_step_that_runs_again_draws_the_same_and_another_seed_does_not() -> None:
    draws = [[chosen("x" * 50, 3, step, seed) for step in range(10)] for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    assert all(own == sorted({*own}) for own in draws[0])


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (2, 2), (9, 2)])
def test_there_are_no_more_than_there_are(count: int, expected: int) -> None:
    assert len(chosen("x-", count, 1)) == expected
    assert chosen("", count, 1) == []


def test_samples_are_numbered_group_after_group_whatever_their_sizes() -> None:
    info, prompt = SampleInfo(1, "stop", ((0, 0),), Score(0.0, {})), Prompt("p", (1,), "", "", "")
    of = [Group(prompt, (info,) * size) for size in (1, 3, 2)]
    assert sample_numbers(of, [1, 2]) == [range(1, 4), range(4, 6)]
    assert sample_numbers(of, [0]) == [range(0, 1)]


AWAY = Score(0.0, {}, unscorable="the judge is away")


def group(task: str, *scores: Score) -> Group:
    infos = tuple(SampleInfo(4, "stop", ((0, 0),), score) for score in scores)
    return Group(Prompt(task, (1,), "?", "8", task), infos)


def rewards(*groups: Group) -> dict[str, float]:
    metrics = rollout_metrics(groups, "accuracy")
    return {name: value for name, value in metrics.items() if name.startswith("reward/")}


def test_terms_are_averaged_over_the_samples_that_have_them():
    sums = group("sums", Score(1.0, {"accuracy": 1.0}), Score(0.0, {"accuracy": 0.0}))
    code = group("code", Score(0.5, {"tests": 0.5}), Score(0.7, {"tests": 0.7}))
    assert rewards(sums, code) == {
        "reward/mean": 0.55,
        "reward/std": pytest.approx(0.1325**0.5),
        "reward/accuracy": 0.5,
        "reward/tests": 0.6,
        "reward/unscorable": 0,
        "reward/code/total": 0.6,
        "reward/sums/total": 0.5,
    }


def test_a_sample_without_the_value_of_a_watched_term_counts_in_all_other_means():
    seen, unseen = Score(1.0, {"format": 1.0, "accuracy": 0.5}), Score(0.0, {"format": 0.0})
    assert rewards(group("sums", seen, unseen)) == {
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "reward/format": 0.5,
        "reward/accuracy": 0.5,
        "reward/unscorable": 0,
    }


def test_one_task_has_no_metrics_of_its_own():
    assert rewards(group("sums", Score(1.0, {"accuracy": 1.0}))) == {
        "reward/mean": 1.0,
        "reward/std": 0.0,
        "reward/accuracy": 1.0,
        "reward/unscorable": 0,
    }


def test_samples_without_a_score_are_counted_and_count_in_no_mean():
    scored = group("sums", Score(1.0, {"accuracy": 1.0}), AWAY, AWAY)
    assert rewards(scored) == {"reward/mean": 1.0, "reward/std": 0.0, "reward/accuracy": 1.0, "reward/unscorable": 2}
    assert rewards(scored, group("code", AWAY))["reward/sums/total"] == 1.0
    assert "reward/code/total" not in rewards(scored, group("code", AWAY))


def test_a_step_in_which_nothing_could_be_scored_has_no_means():
    assert rewards(group("sums", AWAY)) == {"reward/unscorable": 1}
    assert rollout_metrics([group("sums", AWAY)], "accuracy")["rollout/length_mean"] == 4


def test_steps_are_counted_where_they_are_scored():
    two, one = Score(1.0, {}, steps=((0, 1.0), (3, 0.0))), Score(1.0, {}, steps=((3, 1.0),))
    assert rollout_metrics([group("sums", two, one, AWAY)], "accuracy")["rollout/steps_mean"] == 1.5
    assert "rollout/steps_mean" not in rollout_metrics([group("sums", AWAY)], "accuracy")


INFOS = st.builds(
    lambda length, given, success, total: SampleInfo(
        length + given,
        "stop",
        ((0, 0),),
        AWAY if total is None else Score(total, {} if success is None else {"accuracy": success}),
        given=((1, 1 + given),) if given else (),
        calls=int(given > 0),
    ),
    st.integers(1, 300),
    st.sampled_from([0, 0, 5]),
    st.none() | st.sampled_from([-1.0, 0.0, 0.25, 1.0, 2.0]),
    st.none() | st.floats(-5, 5),
)
GROUPS = st.lists(st.lists(INFOS, min_size=1, max_size=5), min_size=1, max_size=60)


@given(GROUPS)
def test_spread_lengths_and_unanimity_are_what_their_definitions_say(parts: list[list[SampleInfo]]) -> None:
    """Against plain counting: no sorting, and exact fractions for the deviation."""
    prompt = Prompt("p", (1,), "?", "8", "sums")
    found = rollout_metrics([Group(prompt, tuple(infos)) for infos in parts], "accuracy")
    infos = [info for of_group in parts for info in of_group]
    lengths = [info.length - sum(end - first for first, end in info.given) for info in infos]
    assert found["rollout/tokens"] == sum(lengths)
    for percent in (50, 99):
        value = found[f"rollout/length_p{percent}"]
        assert value in lengths
        assert 100 * sum(length <= value for length in lengths) >= percent * len(lengths)
        assert 100 * sum(length < value for length in lengths) < percent * len(lengths)
    rewards = [Fraction(info.score.total) for info in infos if not info.score.unscorable]
    if rewards:
        mean = sum(rewards) / len(rewards)
        variance = sum((reward - mean) ** 2 for reward in rewards) / len(rewards)
        assert found["reward/std"] == pytest.approx(math.sqrt(variance), rel=1e-12, abs=1e-150)
    else:
        assert "reward/std" not in found
    verdicts: Counter[str] = Counter()
    for of_group in parts:
        successes = [info.score.terms["accuracy"] for info in of_group if info.score.terms]
        if successes:
            verdicts["right"] += all(success >= 1 for success in successes)
            verdicts["wrong"] += not any(success > 0 for success in successes)
            verdicts["all"] += 1
    for kind in ("right", "wrong"):
        shown = found.get(f"rollout/all_{kind}")
        assert shown == (verdicts[kind] / verdicts["all"] if verdicts["all"] else None)


def test_staleness_is_an_average_over_sampled_tokens_not_over_segments() -> None:
    """Seven tokens of the current version 4; two of version 3 and one of version 1. Given ones have no age."""
    segments = {8: ((0, 1), (1, 4)), 6: ((0, 3), (3, 4))}
    given = {8: ((1, 3), (6, 7)), 6: ((1, 2),)}
    infos = [SampleInfo(size, "stop", parts, Score(0.0, {}), given=given[size]) for size, parts in segments.items()]
    step = Step([Group(Prompt("p", (1,), "", "", ""), tuple(infos))], [True], [], version=4)
    assert staleness(step) == {
        "rollout/staleness_mean": 0.5, "rollout/staleness_max": 3, "rollout/tokens_newest": 0.7
    }  # fmt: skip


def test_each_token_has_the_age_of_its_segment_and_given_ones_have_none() -> None:
    info = SampleInfo(6, "stop", ((0, 1), (1, 3), (4, 4)), Score(0.0, {}), given=((2, 3), (5, 6)))
    assert ages(info, 4) == {"ages": [3, 1, None, 1, 0, None]}
    assert ages(SampleInfo(2, "stop", ((0, 3),), Score(0.0, {})), 4) == {"ages": [1, 1]}, "whole, but it waited"
    assert ages(SampleInfo(2, "stop", ((0, 4),), Score(0.0, {})), 4) == {}, "as in runs without slices"


def test_equal_rewards_deviate_by_nothing_at_all():
    """0.1 is no binary fraction: a mean that is rounded would leave something."""
    assert rewards(group("sums", *[Score(0.1, {})] * 7))["reward/std"] == 0.0
