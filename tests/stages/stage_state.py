"""What a stage holds, for tests that a stop loses none of it."""

from __future__ import annotations

import re
from array import array
from zlib import crc32

import torch
from megatron.core.optimizer import MegatronOptimizer

OWN = re.compile(r"grpo_mega\.(?!types|config|observe\.timer)")
"""Modules of this project whose objects change; without the timer, on whose seconds no result depends."""
NOT_SAVED = {
    "flops": "they belong to the step that is recorded next, which a resumed run begins anew",
    "rollouts.engine._distributed": "it decides which rank gets the next sample, and no result depends on that",
    "watch._compared": "every start compares the engine's log-probs once",
}
"""Attributes that a start does not find again -> why it need not."""


def held(owner: object) -> dict[str, str]:
    """{path: value} of all that an object holds: in its collections, in its attributes, and in those of every object of
    this project among them; of tensors, weights and moments the checksums. A new attribute is among them by itself.
    """
    found: dict[str, str] = {}
    seen: set[int] = set()

    def look(value: object, path: str) -> None:
        if value is None or isinstance(value, bool | int | float | str):
            found[path] = repr(value)
        elif isinstance(value, torch.Tensor):
            found[path] = str(crc32(value.detach().cpu().flatten().contiguous().view(torch.uint8).numpy()))
        elif isinstance(value, torch.nn.Module):
            look(dict(value.state_dict()), path)
        elif isinstance(value, MegatronOptimizer):
            parts = getattr(value, "chained_optimizers", [value])
            look([[*part.optimizer.state.values()] for part in parts], path)
        elif isinstance(value, dict):
            for key, inside in value.items():
                look(inside, f"{path}.{key}")
        elif isinstance(value, list | tuple | array):
            for number, inside in enumerate(value):
                look(inside, f"{path}.{number}")
        elif id(value) not in seen and OWN.match(type(value).__module__):
            seen.add(id(value))
            for name, inside in getattr(value, "__dict__", {}).items():
                look(inside, f"{path}.{name}")

    look(owner, "")
    return {path.removeprefix("."): value for path, value in found.items()}


def lost(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Paths whose values a start has not found, of a list one path; but for `NOT_SAVED`. None is like no value."""
    paths = [path for path in before | after if before.get(path, "None") != after.get(path, "None")]
    other = {re.sub(r"\.\d+", "", path) for path in paths}
    return sorted(path for path in other if not path.endswith(tuple(NOT_SAVED)))


def unmoved(state: dict[str, str], fresh: dict[str, str]) -> list[str]:
    """Paths of what a stage's state holds that are as in a fresh stage: a test with this state says nothing about them.

    Texts do not count: they say of which data or model a state is, and another one is refused.
    """
    numbers = {re.sub(r"\.\d+", "", path) for path, value in state.items() if value[0] not in "'\""}
    return sorted(numbers - {*lost(fresh, state)})
