"""Runs whose samples outlive steps: sliced or not, stopped or not, they are the same; and each token is corrected for
the weights that sampled it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import results, run_ranks, words_of_long

from grpo_mega.config.load import compose_config
from grpo_mega.errors import ConfigError

JOB = Path(__file__).with_name("slices_job.py")
LAYOUTS = [
    pytest.param((1, ["layout=single"]), id="alone"),
    pytest.param((2, ["layout=ep2"]), id="ep2", marks=pytest.mark.long),
    pytest.param((2, ["layout=tp2"]), id="tp2", marks=pytest.mark.long),
    pytest.param((2, ["layout=pp2"]), id="pp2", marks=pytest.mark.long),
    pytest.param((2, ["layout=single", "layout.cp=2"]), id="cp2", marks=pytest.mark.long),
    pytest.param((2, ["layout=single"]), id="replicas", marks=pytest.mark.long),
    pytest.param((4, ["layout=tp2_pp2"]), id="tp2_pp2", marks=pytest.mark.long),
]


def long_ones(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.fixture(scope="module", params=LAYOUTS)
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    ranks, layout = request.param
    words = [str(tmp_path_factory.mktemp("slices")), *words_of_long(request), *layout]
    return results(run_ranks(JOB, ranks, words, timeout=600))


def test_slices_that_no_completion_exceeds_change_nothing(found: dict[str, Any]) -> None:
    whole = found["whole_completions"]
    assert whole["same"] == [True] * 3
    assert whole["newest"][0] == []
    assert whole["newest"][1] == whole["newest"][2] == pytest.approx([1.0] * 6, abs=1e-6)
    assert whole["stale"] == [[], [0, 0.0], [0, 0.0]] or whole["stale"] == [[], [0], [0]]


def test_without_learning_slices_change_no_sample(found: dict[str, Any]) -> None:
    for name, seen in found["without_learning"].items():
        assert seen["common"] >= 32, (name, seen)
        assert not seen["unlike"], (name, seen)
        assert seen["off"] < 1e-5, (name, seen)


def test_only_the_order_submitted_is_that_of_the_prompts(found: dict[str, Any]) -> None:
    seen = found["without_learning"]
    assert all(of_run["ordered"] for name, of_run in seen.items() if "submitted" in name)
    assert not seen["still-1"]["ordered"]


def test_each_segment_has_the_logprobs_of_its_version(found: dict[str, Any]) -> None:
    seen = found["versions"]
    assert seen["own"] < 1e-5
    assert seen["drift"] > 1e-3, "the versions are too alike to be told apart"
    assert seen["segments"] > 2
    assert seen["bound"] > 2, "two updates a step"
    assert seen["mismatch"] < 1e-5, "only tokens of the newest version are compared"
    assert any(seen["in_flight"])


@pytest.mark.parametrize("name", ["ahead_sliced", *long_ones("ahead_whole")])
def test_what_is_generated_ahead_is_the_same_but_for_its_version(found: dict[str, Any], name: str) -> None:
    """The step's first update has no part in what it generates for the next step."""
    seen = found["ahead"][name]
    assert seen["same"], "without learning"
    assert seen["own"] < 1e-5
    # If too few groups are complete, a step adds slices, sampled by its own weights.
    assert seen["newest"][:2] == [0, 0]
    assert seen["newest"] == [0, 0, 1, 2] or name == "ahead_sliced"
    assert max(seen["staleness"]) <= seen["bound"]
    assert seen["bound"] == 1 or name == "ahead_sliced"
    assert all(seen["in_flight"])


def test_samples_that_join_a_slice_ahead_have_the_weights_that_its_engine_has(found: dict[str, Any]) -> None:
    """Not those of the updates meanwhile: the engine would refuse their version."""
    assert found["apart"]["late"] > 0
    assert max(found["apart"]["staleness"]) > 0


def test_records_and_metrics_say_how_old_tokens_are(found: dict[str, Any]) -> None:
    seen = found["shown"]
    assert not seen["unlike"]
    assert seen["aged"] > 3, "samples of several versions are shown"
    assert all(said == pytest.approx(counted) for said, counted in seen["newest"])
    assert len({said for said, _ in seen["newest"]}) > 1
    assert all(in_flight - waiting == unfinished for in_flight, waiting, unfinished in seen["waiting"])
    assert any(0 < waiting < in_flight for in_flight, waiting, _ in seen["waiting"])
    assert 0 < seen["effective"] < 0.999


@pytest.mark.parametrize(
    "name", ["plain", *long_ones("ahead", "refill", "submitted", "ppo", "curriculum", "adapters", "ahead_refill")]
)
def test_a_stop_with_samples_in_flight_changes_nothing(found: dict[str, Any], name: str) -> None:
    """Between two steps, after an update, and within a slice."""
    seen = found["stopped"][name]
    assert not seen["lost"]
    assert seen["metrics"]
    assert seen["digest"]
    assert seen["waiting"]


def test_a_fork_with_other_sizes_drops_what_is_in_flight(found: dict[str, Any]) -> None:
    assert found["forked"]["groups"] == 0
    assert found["forked"]["submitted"] > 0
    assert found["forked"]["longest"] <= 6


def test_a_fork_of_a_run_without_slices_goes_on_with_its_draws(found: dict[str, Any]) -> None:
    """Three steps are done, so no noise of theirs comes again; at the end the summary counts what waits."""
    fork = found["forked_from_whole_completions"]
    assert fork["draws"]
    assert min(fork["draws"]) >= 3
    assert fork["counted"] == fork["waiting"] > 0


SLICED = ["experiment=tiny", "rollout.slice_tokens=16"]


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("algorithm.correction", []),
        ("algorithm.correction", ["rollout.slice_tokens=null", "rollout.ahead=true"]),
        ("rollout.slice_tokens", ["rollout.slice_tokens=0", "algorithm.correction=mask"]),
        ("rollout.slice_tokens", ["rollout.slice_tokens=-16", "algorithm.correction=mask"]),
        ("rollout.in_flight", ["rollout.in_flight=0", "algorithm.correction=mask"]),
        ("rollout.slice_tokens", ["rollout.slice_tokens=100000", "algorithm.correction=mask"]),
        (
            "algorithm.prompts_per_step",
            ["rollout.in_flight=7", "algorithm.prompts_per_step=8", "algorithm.correction=mask"],
        ),
        ("rollout.in_flight", ["rollout.slice_tokens=null", "rollout.in_flight=9"]),
        ("rollout.reserve", ["rollout.slice_tokens=null", "rollout.reserve=9"]),
        ("rollout.reserve", ["rollout.reserve=-1", "algorithm.correction=mask"]),
        ("rollout.ahead", ["experiment=r1zero_671b", "rollout.ahead=true", "algorithm.correction=mask"]),
        ("rollout.order", ["rollout.slice_tokens=null", "rollout.order=submitted"]),
    ],
)
def test_what_slices_cannot_do_is_refused(field: str, more: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        compose_config([*SLICED, *more])
    assert [problem.field for problem in refused.value.problems].count(field) == 1


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    job = JOB.with_name("sliced_neighbours_job.py")
    words = [str(tmp_path_factory.mktemp("beside")), *words_of_long(request), "layout=single"]
    return results(run_ranks(job, 1, words))


@pytest.mark.parametrize(
    "feature",
    [
        "steps",
        *long_ones(
            "critic", "curriculum", "waves", "teacher", "reference", "kl_in_reward", "sequence", "adapters", "average"
        ),
        *long_ones("longer"),
    ],
)
def test_slices_that_no_completion_exceeds_change_no_other_feature(beside: dict[str, Any], feature: str) -> None:
    assert beside["whole_completions"][feature]


def test_a_single_update_corrects_old_tokens_like_one_of_several(beside: dict[str, Any]) -> None:
    """Its loss computes log-probs and corrections by itself; those of several updates are computed before."""
    seen = beside["single_update"]
    assert seen["without a pass"] == [True, False]
    assert seen["corrected"] > 0
    for one, other in zip(*seen["metrics"], strict=True):
        assert one == pytest.approx({name: other[name] for name in one}, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", ["critic", "reference", *long_ones("teacher", "adapters")])
def test_critic_teacher_and_reference_see_old_tokens_with_their_present_weights(
    beside: dict[str, Any], name: str
) -> None:
    seen = beside["current_weights"][name]
    assert max(seen["off"].values()) < 1e-5
    assert seen["old"] > 1e-3, "no token is of earlier weights"


@pytest.mark.parametrize("name", ["sliced", *long_ones("ahead")])
def test_evaluations_leave_samples_in_flight_alone(beside: dict[str, Any], name: str) -> None:
    assert beside["evaluated"][name]["same"]
    assert beside["evaluated"][name]["waiting"] > 0


def test_samples_in_flight_grow_to_a_limit_that_rises(beside: dict[str, Any]) -> None:
    seen = beside["longer"]
    assert seen["common"] >= 48
    assert not seen["unlike"]
    assert seen["lengths"] == [12]
    assert max(seen["last token"]) == 2
    assert min(seen["thirteenth token"]) == 3
    assert seen["grown"] > 0


def test_groups_without_signal_are_refilled_from_those_that_complete_next(beside: dict[str, Any]) -> None:
    seen = beside["refilled"]
    assert seen["signal"] == [[4, True]] * 5
    assert seen["refilled"] == seen["dropped"]
    assert max(seen["dropped"]) > 0
    assert seen["known"]
