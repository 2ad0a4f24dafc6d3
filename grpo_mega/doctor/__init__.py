"""Whether this machine is fit to train: versions and abilities of software and machine, each with a verdict and a fix.

It needs only Python, because it must be able to report that torch is missing. Packages that may crash or hang when they
are imported are imported in a process of their own.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

from grpo_mega.doctor import machine, software
from grpo_mega.doctor.finding import Finding


def examine(runs: Path) -> Iterator[Finding]:
    """All findings, in the order in which they are best fixed; `runs` is the directory for run directories."""
    gpus, driver = machine.graphics()
    yield Finding("python", platform.python_version())
    yield driver
    yield from software.torch(gpus)
    yield from software.required()
    yield from software.optional(bool(gpus))
    yield software.apex(bool(gpus))
    yield machine.shared_memory(machine.size_of(Path("/dev/shm")), bool(gpus))
    yield machine.host_memory(machine.main_memory(), sum(gpu.memory for gpu in gpus))
    yield from machine.limits(bool(gpus), any(Path("/sys/class/infiniband").glob("*")))
    yield machine.sandbox()
    yield machine.filesystem(runs)
