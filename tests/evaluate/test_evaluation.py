"""Evaluations of a run, on one process and under expert parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import results, run_ranks

from grpo_mega.evaluate.estimates import best_of

JOB = Path(__file__).with_name("evaluation_job.py")


def evaluated(folder: Path, ranks: int) -> dict[str, Any]:
    return results(run_ranks(JOB, ranks, [str(folder)]))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process sees."""
    return evaluated(tmp_path_factory.mktemp("one"), 1)


@pytest.mark.long
def test_two_processes_see_the_same(seen: dict[str, Any], tmp_path: Path) -> None:
    assert evaluated(tmp_path, 2) == seen


def test_one_sample_is_reported_as_the_plain_mean(seen: dict[str, Any]) -> None:
    one = seen["one"]
    assert one["metrics"] == {
        "accuracy": sum(score["exact"] for score in one["scores"]) / 9,
        "format": sum(score["format"] for score in one["scores"]) / 9,
        "length": sum(map(len, one["tokens"])) / 9,
    }
    assert [*one["metrics"]] == ["accuracy", "format", "length"]


def test_more_samples_begin_with_the_same_one(seen: dict[str, Any]) -> None:
    assert seen["four"]["tokens"][::4] == seen["one"]["tokens"]
    assert len({tuple(tokens) for tokens in seen["four"]["tokens"]}) > 30


def test_several_samples_are_reported_with_pass_and_majority(seen: dict[str, Any]) -> None:
    names = ["accuracy", "format", "length", "truncated", "pass@2", "pass@4", "maj@2", "maj@4"]
    assert [*seen["four"]["metrics"]] == names
    valued = seen["valued"]["metrics"]
    assert [*valued] == ["accuracy", "length", "truncated", "pass@2", "pass@4"], "only the function knows the answers"
    values = [score["own"] for score in seen["valued"]["scores"]]
    assert {*values} == {0.0, 0.5, 1.0}
    of_problems = [values[first : first + 4] for first in range(0, 36, 4)]
    assert valued["accuracy"] == pytest.approx(sum(values) / 36)
    assert valued["pass@2"] == pytest.approx(sum(best_of(of_problem, 2) for of_problem in of_problems) / 9)
    assert valued["pass@4"] == pytest.approx(sum(max(of_problem) for of_problem in of_problems) / 9)
    assert valued["length"] == pytest.approx(sum(map(len, seen["valued"]["tokens"])) / 36)


def test_evaluations_may_sample_in_a_way_of_their_own(seen: dict[str, Any]) -> None:
    for name in ("greedy", "narrow"):
        tokens = seen[name]["tokens"]
        assert all(tokens[first : first + 4] == [tokens[first]] * 4 for first in range(0, 36, 4)), name


def test_ranks_vote_together_as_one_would(seen: dict[str, Any]) -> None:
    four = seen["four"]
    assert four["votes"] == four["votes_alone"]
    assert {None, 0, 1} == {vote for votes in four["votes"] for vote in votes}


def test_a_stop_in_an_evaluation_changes_nothing(seen: dict[str, Any]) -> None:
    stopped = seen["stopped"]
    assert stopped["interrupted"]
    assert stopped["undone"], "random generators"
    assert stopped["metrics"] == seen["four"]["metrics"]
