"""Python as a tool under other limits, and on machines without a sandbox."""

from __future__ import annotations

import os
from typing import Any

from grpo_mega.environment.python import Python
from grpo_mega.judges.sandbox import Limits, pool


class Patient(Python):
    limits = Limits(cpu_seconds=60, wall_seconds=60.0)


class Computing(Python):
    limits = Limits(cpu_seconds=1, wall_seconds=60.0)


class Waiting(Python):
    limits = Limits(cpu_seconds=1, wall_seconds=1.0)


class Lost(Python):
    """On a machine that loses its sandbox after the start."""

    def python(self, code: str) -> str:
        os.environ["PATH"] = "/nonexistent"
        return super().python(code)


def __getattr__(name: str) -> Any:
    if name == "Nowhere":
        os.environ["PATH"] = "/nonexistent"
        pool.MECHANISMS = ("bubblewrap",)  # as where the kernel has no Landlock
        return Python
    raise AttributeError(name)
