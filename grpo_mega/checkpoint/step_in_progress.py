"""A step that was stopped after some of its updates: what the rest of it needs, in one file of the checkpoint.

The batch is that of all ranks, so the file means the same under every layout.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from grpo_mega.checkpoint.integrity import vouched
from grpo_mega.checkpoint.reading import load_tensors
from grpo_mega.types import Batch, Group, Prompt, Sample, Score

FILE = "step-in-progress.pt"


@dataclass
class StepInProgress:
    """A step whose answers are generated and scored.

    Attributes:
        groups: The answers and their rewards.
        batch: Those that updates compute, with every log-prob these need; None when nothing can move the policy.
        updates: The metrics of each update done so far.
        mismatch: Without a batch, how far the trainer's log-probs of the answers are from the engine's, for the log.
    """

    groups: list[Group]
    batch: Batch | None
    updates: list[dict[str, float]] = field(default_factory=list)
    mismatch: dict[str, float] = field(default_factory=dict)


def save(checkpoint: Path, step: StepInProgress) -> None:
    """Writes the step into the checkpoint; called on the main rank."""
    tensors = {f.name: getattr(step.batch, f.name) for f in fields(Batch)} if step.batch else None
    groups = [_group_to_json(group) for group in step.groups]
    said = {"groups": groups, "updates": step.updates, "mismatch": step.mismatch}
    torch.save({"batch": tensors, "said": json.dumps(said)}, checkpoint / FILE)


def load(checkpoint: Path) -> StepInProgress | None:
    """The step that `save` was given, equal in every bit; None when the checkpoint was written between two steps."""
    if FILE not in vouched(checkpoint):
        return None
    saved = load_tensors(checkpoint / FILE)
    said = json.loads(saved["said"])
    batch = Batch(**saved["batch"]) if saved["batch"] else None
    groups = [_group_from_json(group) for group in said["groups"]]
    return StepInProgress(groups, batch, said["updates"], said["mismatch"])


def _group_to_json(group: Group) -> dict[str, Any]:
    return {
        "samples": [_sample_to_json(sample) for sample in group.samples],
        "scores": [asdict(score) for score in group.scores],
    }


def _group_from_json(record: dict[str, Any]) -> Group:
    return Group(
        tuple(_sample_from_json(sample) for sample in record["samples"]),
        tuple(Score(**score) for score in record["scores"]),
    )


def _sample_to_json(sample: Sample) -> dict[str, Any]:
    """Without its experts: the batch has them, and they are a thousand numbers per token."""
    return asdict(replace(sample, experts=None))


def _sample_from_json(record: dict[str, Any]) -> Sample:
    """Equal in every bit but for its experts."""
    return Sample(**_tuples(record | {"prompt": Prompt(**_tuples(record["prompt"]))}))


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with tuples for lists, also within each other: JSON has no tuples."""
    return {name: _tuple(value) for name, value in fields.items()}


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value
