"""Checks whether this machine can train: software and hardware, each with a verdict and a fix.

It needs only Python, so that it can report that torch is missing. Packages whose import may crash or hang are imported
in a separate process.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

from grpo_mega.forecast.doctor import machine, software
from grpo_mega.forecast.doctor.finding import Finding


def examine(runs: Path) -> Iterator[Finding]:
    """Yields all findings, in the order in which they are best fixed; `runs` is the directory for run directories."""
    gpus, driver = machine.graphics()
    yield Finding("python", platform.python_version())
    yield driver
    yield from software.torch(gpus)
    yield from software.required()
    yield from software.optional(bool(gpus))
    yield software.apex(bool(gpus))
    if gpus:
        yield software.locked()
    yield machine.shared_memory(machine.size_of(Path("/dev/shm")), bool(gpus))
    yield machine.host_memory(machine.main_memory(), sum(gpu.memory for gpu in gpus))
    yield from machine.limits(bool(gpus), any(Path("/sys/class/infiniband").glob("*")))
    yield machine.sandbox()
    yield machine.filesystem(runs)
