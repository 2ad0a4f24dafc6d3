"""The loop of on-policy distillation, on real Megatron models in one real process (distill_steps_job.py)."""

from __future__ import annotations

import statistics
from itertools import chain, compress
from pathlib import Path
from typing import Any

import pytest
from metric_lines import unexplained
from ranks import results, run_ranks


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    job = Path(__file__).with_name("distill_steps_job.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(job.parent), prepend=":")
        return results(run_ranks(job, 1, [str(tmp_path_factory.mktemp("distill"))]))


def test_groups_of_one_with_equal_rewards_or_none_are_learned(seen: dict[str, Any]) -> None:
    assert len(seen["columns"]["mask"]) == 8
    assert 0 < seen["unscorable"] < 8
    assert not unexplained(step["metrics"] for step in seen["steps"])
    for step in seen["steps"]:
        assert step["moved"] > 0
        assert step["metrics"]["policy/grad_norm"] > 0
        assert "rollout/groups_with_signal" not in step["metrics"], "a group is no unit"


def test_an_advantage_is_the_teacher_s_log_prob_less_the_policy_s(seen: dict[str, Any]) -> None:
    """At the temperature of the samples; the teacher's are those of its weights, loaded by another way."""
    columns, largest = seen["columns"], 0.0
    for i, mask in enumerate(columns["mask"]):
        teacher, policy = seen["teacher alone"][i], seen["policy alone"][i]
        assert columns["teacher_logprob"][i] == pytest.approx(teacher, abs=1e-3)
        expected = [0.5 * (p - q) if m else 0.0 for m, p, q in zip(mask, teacher, policy, strict=True)]
        assert columns["advantage"][i] == pytest.approx(expected, abs=1e-3)
        added = [(e + 2.0 * a) if m else 0.0 for m, e, a in zip(mask, expected, seen["made up"][i], strict=True)]
        assert seen["rewarded"][i] == pytest.approx(added, abs=1e-3)
        largest = max(largest, *map(abs, expected))
    assert largest > 0.1


def test_metrics_are_of_the_step_as_it_was_sampled(seen: dict[str, Any]) -> None:
    sampled = [m for mask in seen["columns"]["mask"] for m in mask]
    of_policy, of_teacher = ([*compress(chain(*seen[name]), sampled)] for name in ("policy alone", "teacher alone"))
    teacher_logprob = statistics.fmean(of_teacher)
    assert seen["metrics"]["distill/teacher_logprob"] == pytest.approx(teacher_logprob, abs=1e-3)
    assert seen["metrics"]["distill/reverse_kl"] == pytest.approx(
        statistics.fmean(of_policy) - teacher_logprob, abs=1e-4
    )
    first, *_, last = (step["metrics"]["distill/reverse_kl"] for step in seen["steps"])
    assert last < first, "three steps are enough to come nearer"


def test_nothing_moves_the_teacher_and_it_is_not_saved_but_named(seen: dict[str, Any]) -> None:
    assert seen["still"]
    assert "weights" in seen["saved"]
    assert "teacher" not in seen["saved"]
    assert seen["state"] == seen["teacher's"]
    assert len(seen["state"]) == 64


def test_a_policy_that_is_its_teacher_has_nothing_to_learn(seen: dict[str, Any]) -> None:
    assert seen["own"]["distill/reverse_kl"] == pytest.approx(0, abs=1e-6)
    learning = seen["steps"][0]["metrics"]["policy/grad_norm"]
    assert learning > 1e-2
    assert seen["own"]["policy/grad_norm"] < 1e-3 * learning


def test_a_start_finds_all_that_the_stage_held(seen: dict[str, Any]) -> None:
    assert seen["lost"] == []


def test_a_run_that_continues_with_another_teacher_is_refused(seen: dict[str, Any]) -> None:
    assert "but this run began with a teacher of checksum" in seen["other"]
    assert f"checksum {seen['state'][:12]}..." in seen["other"]
