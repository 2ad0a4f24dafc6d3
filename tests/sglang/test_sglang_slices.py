"""Completions that outlive steps in real SGLang: weights are pushed while samples are in flight, and an engine dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from on_cuda import CLOSE
from ranks import results, run_ranks

JOB = Path(__file__).with_name("sglang_slices_job.py")


@pytest.fixture(scope="module", params=[(1, "single"), (2, "ep2")], ids=["alone", "ep2"])
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    ranks, layout = request.param
    return results(run_ranks(JOB, ranks, [str(tmp_path_factory.mktemp("slices")), f"layout={layout}"]))


def test_weights_are_pushed_between_slices_with_samples_in_flight(found: dict[str, Any]) -> None:
    assert min(found["unfinished"]) > 0
    for metrics in found["metrics"]:
        assert metrics["sync/bytes"] > 0
        assert metrics["sync/mean_abs"] < CLOSE
        assert metrics.get("mismatch/max_abs", 0.0) < CLOSE
    assert max(metrics["rollout/staleness_max"] for metrics in found["metrics"]) > 1


def test_segments_are_what_positions_say(found: dict[str, Any]) -> None:
    assert not found["unlike"]
    assert found["segments"] > 2


def test_each_segment_has_the_logprobs_of_its_version(found: dict[str, Any]) -> None:
    assert max(found["own"]) < CLOSE
    assert found["drift"] > 10 * max(found["own"]), "the versions are too alike to be told apart"


def test_a_run_whose_engine_is_killed_within_a_slice_loses_and_repeats_nothing(found: dict[str, Any]) -> None:
    before, after = found["engine"]
    assert not {*before} & {*after}
    assert found["trained"]
    assert found["submitted"] == found["known"]
    assert found["taken"] == 4 * 4 * len(found["metrics"])


def test_each_token_is_trained_on_experts_that_the_engine_chose(found: dict[str, Any]) -> None:
    assert found["unrouted"] == 0
