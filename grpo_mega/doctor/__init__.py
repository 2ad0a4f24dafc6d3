"""Is this machine fit to train? Versions and abilities of software and machine, each with a verdict and what mends it.

Needs nothing but Python: it must be able to say that torch is missing. Whatever may crash or hang when it is imported
is imported in a process of its own.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

from grpo_mega.doctor import machine, software
from grpo_mega.doctor.finding import Finding


def examine(runs: Path) -> Iterator[Finding]:
    """Everything, in the order in which it is best mended; `runs` is where run directories will lie."""
    gpus, driver = machine.graphics()
    yield Finding("python", platform.python_version())
    yield driver
    yield from software.torch(gpus)
    yield from software.required()
    yield from software.accelerators(bool(gpus))
    yield software.apex(bool(gpus))
    yield machine.shared_memory(machine.size_of(Path("/dev/shm")), bool(gpus))
    yield machine.host_memory(machine.main_memory(), sum(gpu.memory for gpu in gpus))
    yield from machine.limits(bool(gpus), any(Path("/sys/class/infiniband").glob("*")))
    yield machine.filesystem(runs)
