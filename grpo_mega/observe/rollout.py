"""What to log about the answers of one step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from grpo_mega.types import Group


def average(values: Iterable[float]) -> float:
    """The mean of at least one number."""
    values = list(values)
    return sum(values) / len(values)


def rollout_metrics(groups: list[Group], success: str) -> dict[str, float]:
    """Rewards and lengths; `success` names the term reported as accuracy."""
    samples = [sample for group in groups for sample in group.samples]
    terms = {name: average(x for g in groups for x in g.components[name]) for name in groups[0].components}
    return {
        "reward/mean": average(r for g in groups for r in g.rewards),
        **{f"reward/{name}": value for name, value in terms.items()},
        "reward/accuracy": terms[success],
        "rollout/length_mean": average(len(s.token_ids) for s in samples),
        "rollout/length_max": max(len(s.token_ids) for s in samples),
        "rollout/truncated": average(s.finish_reason == "length" for s in samples),
    }


def sample_records(groups: list[Group], count: int) -> list[dict[str, Any]]:
    """The first sample of the first `count` groups, as samples/ shows them."""
    return [
        {
            "prompt_id": group.prompt.id,
            "prompt": group.prompt.text,
            "answer": group.prompt.answer,
            "completion": group.samples[0].text,
            "reward": group.rewards[0],
            **{name: values[0] for name, values in group.components.items()},
            "tokens": len(group.samples[0].token_ids),
            "finish_reason": group.samples[0].finish_reason,
            "policy_version": group.samples[0].policy_version,
        }
        for group in groups[:count]
    ]
