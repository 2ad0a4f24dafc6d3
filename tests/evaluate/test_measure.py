"""What an evaluation reports of scored samples."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.evaluate.measure import by_task, measure, measure_within, metrics
from grpo_mega.evaluate.results import record_of
from grpo_mega.types import Call, Group, Prompt, Sample, SampleInfo, Score

AWAY = Score(0.0, {}, unscorable="the judge is away")


def score(**terms: float) -> Score:
    return Score(sum(terms.values()), terms)


def group(*scores: Score, task: str = "sums", lengths: tuple[int, ...] = ()) -> Group:
    infos = [
        SampleInfo(length, "length" if length > 9 else "stop", ((0, 0),), one)
        for one, length in zip(scores, lengths or (4,) * len(scores), strict=True)
    ]
    return Group(Prompt("p", (1,), "?", "8", task), tuple(infos))


def test_one_sample_per_problem_gives_the_mean_terms_and_the_length_alone() -> None:
    groups = [
        group(score(accuracy=1.0, format=1.0), lengths=(5,)),
        group(score(accuracy=0.0, format=1.0), lengths=(11,)),
    ]
    assert metrics(groups, None, "accuracy") == {"accuracy": 0.5, "format": 1.0, "length": 8.0}
    assert [*metrics(groups, None, "accuracy")] == ["accuracy", "format", "length"]


@given(st.lists(st.tuples(st.floats(-2, 2), st.integers(1, 50)), min_size=1, max_size=20))
def test_one_sample_per_problem_is_averaged_as_a_plain_sum(samples: list[tuple[float, int]]) -> None:
    groups = [group(score(right=value, other=1.0), lengths=(length,)) for value, length in samples]
    found = metrics(groups, None, "right")
    assert found["accuracy"] == sum(value for value, _ in samples) / len(samples)
    assert found["length"] == sum(length for _, length in samples) / len(samples)


def test_calls_of_an_environment() -> None:
    """A problem without calls has none, and no share of wrong ones."""

    def played(*calls: tuple[int, int], task: str = "game") -> Group:
        one = group(*(score(accuracy=1.0) for _ in calls), task=task)
        infos = [replace(a, calls=number, errors=wrong) for a, (number, wrong) in zip(one.infos, calls, strict=True)]
        return replace(one, infos=tuple(infos))

    groups = [played((4, 1), (0, 0)), played((1, 1), (1, 0)), played((0, 0), (0, 0), task="sums")]
    found = metrics(groups, None, "accuracy")
    assert found["environment/calls"] == pytest.approx((2 + 1 + 0) / 3)
    assert found["environment/errors"] == pytest.approx((1 / 4 + 1 / 2) / 2)
    assert found["game/environment/calls"] == 1.5
    assert "sums/environment/calls" not in found
    assert not [name for name in metrics(groups[2:], None, "accuracy") if "environment" in name]


def test_an_environment_s_replies_are_no_part_of_the_length() -> None:
    alone = group(score(accuracy=1.0), lengths=(9,))
    replied = replace(alone, infos=(replace(alone.infos[0], given=((2, 5), (6, 7))),))
    assert metrics([alone, replied], None, "accuracy")["length"] == (9 + 5) / 2
    sample = Sample(alone.prompt, 0, array("i", range(9)), array("f", [0.0] * 9), "stop", ((0, 0),), "")
    assert [record_of(sample, one.infos[0], None)["tokens"] for one in (alone, replied)] == [9, 5]


def test_records_of_episodes_say_where_the_context_began_anew() -> None:
    one, calls = group(score(accuracy=1.0), lengths=(9,)), (Call("1", False),)
    sample = Sample(one.prompt, 0, array("i", range(9)), array("f", [0.0] * 9), "stop", ((0, 0),), "", calls=calls)
    anew = replace(sample, given=((2, 5),), restarts=(2,))
    assert [record_of(each, one.infos[0], None).get("restarts") for each in (sample, anew)] == [None, (2,)]


def test_several_samples() -> None:
    groups = [
        group(score(accuracy=1.0), score(accuracy=0.0), score(accuracy=0.0), lengths=(2, 4, 12)),
        group(score(accuracy=1.0), score(accuracy=1.0), score(accuracy=1.0), lengths=(6, 6, 6)),
    ]
    found = metrics(groups, [[0, 1, 1], [0, 0, 0]], "accuracy")
    assert found == pytest.approx(
        {
            "accuracy": 2 / 3,
            "length": 6.0,
            "truncated": 1 / 6,
            "pass@2": (2 / 3 + 1) / 2,
            "pass@3": 1.0,
            "maj@2": (1 / 3 + 1) / 2,
            "maj@3": 0.5,
        }
    )
    assert [name for name in metrics(groups, None, "accuracy") if "maj" in name] == []


def test_a_reward_model_chooses_of_k_where_it_has_scored_all() -> None:
    """Of the first problem it prefers the right completion, of the second a wrong one."""
    groups = [
        group(score(accuracy=1.0, model=2.0), score(accuracy=0.0, model=1.0), AWAY),
        group(score(accuracy=1.0, model=-1.0), score(accuracy=0.0, model=3.0), score(accuracy=1.0, model=0.0)),
    ]
    found = metrics(groups, None, "accuracy")
    assert (found["rm@2"], found["rm@3"]) == (pytest.approx((1 + 1 / 3) / 2), 0.0)
    unscored = group(score(accuracy=1.0, model=2.0), score(accuracy=0.0))
    assert "rm@2" not in metrics([unscored], None, "accuracy")


def test_each_task_has_metrics_of_its_own_when_there_are_several() -> None:
    groups = [group(score(accuracy=1.0)), group(score(accuracy=0.0), task="code"), group(score(accuracy=0.0))]
    found = metrics(groups, None, "accuracy")
    assert (found["accuracy"], found["sums/accuracy"], found["code/accuracy"]) == (pytest.approx(1 / 3), 0.5, 0.0)
    assert found["code/length"] == 4.0
    assert by_task(groups, None, "accuracy")["sums"] == measure([groups[0], groups[2]], None, "accuracy")


def test_what_could_not_be_scored_counts_nowhere_but_in_lengths() -> None:
    groups = [group(AWAY, score(accuracy=1.0), lengths=(2, 4)), group(AWAY, AWAY)]
    found = metrics(groups, [[None, 0], [None, None]], "accuracy")
    assert found == {"accuracy": 1.0, "length": 3.5, "truncated": 0.0, "unscorable": 3}
    assert metrics([group(AWAY)], None, "accuracy") == {"length": 4.0, "unscorable": 1}


def test_the_success_term_is_the_accuracy_and_names_of_lengths_are_taken() -> None:
    groups = [group(score(boxed=0.5, length=0.1)), group(score(boxed=1.0, length=0.1))]
    assert metrics(groups, None, "boxed") == {"accuracy": 0.75, "length": 4.0}
    assert metrics([group(score(accuracy=0.0, own=0.5))], None, "own")["accuracy"] == 0.5


def test_a_problem_without_the_success_term_is_no_part_of_its_means() -> None:
    groups = [group(score(accuracy=1.0), score(accuracy=1.0)), group(score(tests=0.5), score(tests=0.5), task="code")]
    found = measure(groups, [[0, 0], [0, 0]], "accuracy")
    assert (found["accuracy"].mean, found["pass@2"].problems, found["maj@2"].mean) == (1.0, 1, 1.0)
    assert found["tests"].mean == 0.5


def test_within_budgets_is_the_mean_over_problems_of_the_mean_over_samples() -> None:
    within = {64: [[0.0, 1.0], [1.0, 1.0], []], 16: [[0.0, 0.0], [1.0], []]}
    found = measure_within(within)
    assert [*found] == ["within@16", "within@64"]
    assert [(e.mean, e.problems) for e in found.values()] == [(0.5, 2), (0.75, 2)]
    assert measure_within({16: [[], []]}) == {}
    groups = [group(score(accuracy=1.0)), group(score(accuracy=1.0), task="code"), group(score(accuracy=1.0))]
    by = by_task(groups, None, "accuracy", within)
    assert (by["code"]["within@64"].mean, by["sums"]["within@64"].mean) == (1.0, 0.5)
