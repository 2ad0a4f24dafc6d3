"""A reward that strikes when and where a test says, in the middle of a step."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil

from grpo_mega.types import Sample

FAULT = "GRPO_MEGA_TEST_FAULT"
"""`KIND VERSION RANK FILE`: at the first sample of this policy version on this rank, FILE is made and KIND happens.

Once FILE is there, nothing happens any more; FILE - never is. `rest` goes on when it is taken away.
"""


def disturbed(sample: Sample) -> float:
    """Some number that differs between samples, unless the fault is due."""
    kind, version, rank, file = os.environ.get(FAULT, "none -1 -1 -").split()
    if (sample.policy_version, os.environ["RANK"]) == (int(version), rank) and not Path(file).exists():
        if file != "-":
            Path(file).touch()
        globals()[kind](Path(file))
    return sum(sample.token_ids) % 7 / 7


def rest(file: Path) -> None:
    """Waits until the file is gone; what happens then is over, so the rank makes it again."""
    while file.exists():
        time.sleep(0.02)
    file.touch()


def hold(file: Path) -> None:
    """Waits until the trainer has noted a signal, as it then says."""
    said = Path(f"/proc/{rank().pid}/fd/2").resolve()
    while f"rank {os.environ['RANK']}: SIG" not in said.read_text():
        time.sleep(0.02)


def rank() -> psutil.Process:
    """The rank that this process works for; between them is the guard."""
    return psutil.Process().parent().parent()


def hang(file: Path) -> None:
    """Never comes back."""
    while True:
        signal.pause()


def crash(file: Path) -> None:
    """A bug."""
    raise KeyError("no such column")


def die(file: Path) -> None:
    """What the kernel does when memory runs out."""
    rank().kill()
    signal.pause()
