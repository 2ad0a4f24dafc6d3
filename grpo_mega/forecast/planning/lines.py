"""Names of the lines of `memory.memory` that are not the trainer's tensors in a step.

In a file of their own, as `memory.py` imports Megatron, and who reads plans need not.
"""

from __future__ import annotations

from collections.abc import Mapping

LIBRARIES, ASLEEP, DEEPEP = "libraries", "engine, asleep", "DeepEP's buffers"
EXPORTS = "exports, beyond these"
"""Tensors as well, but between two steps."""
OTHERS = (LIBRARIES, ASLEEP, DEEPEP)
"""What is on a GPU beside the trainer's tensors."""


def of_the_trainer(lines: Mapping[str, float]) -> float:
    """Bytes that the trainer's tensors take at most in a step, of the lines of one pipeline stage."""
    return sum(size for name, size in lines.items() if name not in (*OTHERS, EXPORTS))
