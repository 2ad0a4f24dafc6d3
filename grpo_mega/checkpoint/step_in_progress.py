"""A step that was stopped after some of its updates: what the rest of it needs, in one file of the checkpoint.

The batch is that of all ranks, so the file means the same under every layout.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from grpo_mega.checkpoint import unfinished
from grpo_mega.checkpoint.integrity import vouched
from grpo_mega.checkpoint.reading import load_tensors
from grpo_mega.types import Batch, Group

FILE = "step-in-progress.pt"


@dataclass
class StepInProgress:
    """A step whose answers are generated and scored.

    Attributes:
        groups: The answers and their rewards.
        batch: Those that updates compute, with every log-prob these need; None when nothing can move the policy.
        updates: The metrics of each update done so far.
    """

    groups: list[Group]
    batch: Batch | None
    updates: list[dict[str, float]] = field(default_factory=list)


def save(checkpoint: Path, step: StepInProgress) -> None:
    """Writes the step into the checkpoint; called on the main rank."""
    tensors = {f.name: getattr(step.batch, f.name) for f in fields(Batch)} if step.batch else None
    groups = [_group_to_json(group) for group in step.groups]
    said = {"groups": groups, "updates": step.updates}
    torch.save({"batch": tensors, "said": json.dumps(said)}, checkpoint / FILE)


def load(checkpoint: Path) -> StepInProgress | None:
    """The step that `save` was given, equal in every bit; None when the checkpoint was written between two steps."""
    if FILE not in vouched(checkpoint):
        return None
    saved = load_tensors(checkpoint / FILE)
    said = json.loads(saved["said"])
    batch = Batch(**saved["batch"]) if saved["batch"] else None
    groups = [_group_from_json(group) for group in said["groups"]]
    return StepInProgress(groups, batch, said["updates"])


def _group_to_json(group: Group) -> dict[str, Any]:
    return {
        "samples": unfinished.to_json(group.samples),
        "rewards": group.rewards,
        "components": group.components,
    }


def _group_from_json(record: dict[str, Any]) -> Group:
    components = {name: tuple(values) for name, values in record["components"].items()}
    return Group(tuple(unfinished.from_json(record["samples"])), tuple(record["rewards"]), components)
