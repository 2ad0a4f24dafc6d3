"""The loop of PPO, on real Megatron models in one real process (ppo_steps_job.py)."""

from __future__ import annotations

import statistics
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from metric_lines import unexplained
from ranks import results, run_ranks

NOT_OF_PPO = ("before", "watch.steps_without_signal", "watch.hacking", "schedule.decayed")
"""Entries of the state that `test_grpo.py` fills."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    job = Path(__file__).with_name("ppo_steps_job.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(job.parent), prepend=":")
        return results(run_ranks(job, 1, [str(tmp_path_factory.mktemp("ppo"))]))


def test_the_critic_begins_with_the_policy_s_body(seen: dict[str, Any]) -> None:
    assert seen["body"]


def test_the_critic_learns_alone_for_as_long_as_it_is_told(seen: dict[str, Any]) -> None:
    assert not unexplained(step["metrics"] for step in seen["steps"])
    first, *others = seen["steps"]
    assert first["moved"]["policy"] == 0 < first["moved"]["critic"]
    assert "policy/loss" not in first["metrics"]
    for step in others:
        assert min(step["moved"].values()) > 0
        assert {"policy/loss", "policy/grad_norm", "policy/kl"} <= step["metrics"].keys()


def test_the_critic_learns(seen: dict[str, Any]) -> None:
    """Its first values are 0; what it explains rises, and its loss falls."""
    explained = [step["metrics"]["critic/explained_variance"] for step in seen["steps"]]
    losses = [step["metrics"]["critic/loss"] for step in seen["steps"]]
    assert explained[0] == 0 < explained[-1]
    assert losses[-1] < losses[0]


def test_advantages_are_gae_of_scores_and_penalties_whitened_over_the_step(seen: dict[str, Any]) -> None:
    columns, raw, targets = seen["columns"], [], []
    for i, (mask, score) in enumerate(zip(columns["mask"], seen["scores"], strict=True)):
        completion = [t for t, learned in enumerate(mask) if learned]
        rewards = {t: -0.1 * (columns["old_logprob"][i][t] - columns["ref_logprob"][i][t]) for t in completion}
        rewards[completion[-1]] += score
        value = seen["values"][i]
        later, after, of_sample = 0.0, 0.0, []
        for t in reversed(completion):
            later = rewards[t] + 0.99 * after - value[t] + 0.99 * 0.8 * later
            after = value[t]
            of_sample.append(later)
        raw.append(dict(zip(reversed(completion), of_sample, strict=True)))
        targets.append({t: advantage + value[t] for t, advantage in raw[-1].items()})
    everything = [*chain.from_iterable(of_sample.values() for of_sample in raw)]
    mean, deviation = statistics.fmean(everything), statistics.stdev(everything)
    assert deviation > 0.01
    for i, of_sample in enumerate(raw):
        length = len(columns["mask"][i])
        expected = [(of_sample[t] - mean) / deviation if t in of_sample else 0.0 for t in range(length)]
        assert columns["advantage"][i] == pytest.approx(expected, abs=1e-4)
        assert columns["returns"][i] == pytest.approx([targets[i].get(t, 0.0) for t in range(length)], abs=1e-5)
        assert columns["value"][i] == pytest.approx(seen["values"][i])
        raw_of_sample = [of_sample.get(t, 0.0) for t in range(length)]
        assert seen["not whitened"][i] == pytest.approx(raw_of_sample, abs=1e-5), "advantage_std=none"


def test_a_value_is_that_of_the_state_in_which_the_token_is_chosen(seen: dict[str, Any]) -> None:
    """A baseline that knows the token would bias the gradient: with another last token, no value is another."""
    for values, others in zip(seen["values"], seen["values with another last token"], strict=True):
        assert others == pytest.approx(values, abs=1e-6)
        assert values[-1] != 0


def test_the_critic_has_settings_of_its_own(seen: dict[str, Any]) -> None:
    last = seen["steps"][-1]["metrics"]
    assert last["critic/lr"] == 0.002 != last["policy/lr"]
    assert seen["clip"] == 0.3
    assert "rollout/groups_with_signal" not in last, "of groups of one"


def test_the_critic_s_rate_follows_its_own_updates(seen: dict[str, Any]) -> None:
    """Two a step, from the first step on, in which the policy has none; both have five of warm-up."""
    warmed = [(1 + 2) / 2 / 5, (3 + 4) / 2 / 5, (5 + 5) / 2 / 5, 1.0]
    assert [step["metrics"]["critic/lr"] / 0.002 for step in seen["steps"]] == pytest.approx(warmed)
    policy = [step["metrics"]["policy/lr"] for step in seen["steps"][1:]]
    assert [lr / policy[-1] for lr in policy] == pytest.approx([1.5 / 5, 3.5 / 5, 1.0])


def test_a_start_finds_all_that_the_stage_held(seen: dict[str, Any]) -> None:
    assert [path for path in seen["unmoved"] if not path.startswith(NOT_OF_PPO)] == []
    assert seen["lost"] == []


def test_penalties_are_some(seen: dict[str, Any]) -> None:
    apart = [
        abs(old - ref)
        for olds, refs in zip(seen["columns"]["old_logprob"], seen["columns"]["ref_logprob"], strict=True)
        for old, ref in zip(olds, refs, strict=True)
    ]
    assert max(apart) > 1e-4
