"""Processes that end, or do not end, with others: `orphans_job.py ROLE FOLDER [PID]`, each leaves a FOLDER/ROLE-ID."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

from grpo_mega.platform.orphans import end_with_launcher, end_with_parent, forks_end_with_us

PR_GET_PDEATHSIG = 2
SECONDS = 900
"""After which a process that nobody ended gives up, and the test with it."""


def stay(folder: Path, role: str) -> None:
    """Says that this process is there and what would end it, and does nothing."""
    asked = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(asked), 0, 0, 0)
    temporary = folder / f".{os.getpid()}"
    temporary.write_text(f"{asked.value} {threading.active_count()}")
    temporary.rename(folder / f"{role}-{os.getpid()}")
    threading.Event().wait(SECONDS)


def parent(folder: Path) -> None:
    subprocess.Popen([sys.executable, __file__, "child", str(folder), str(os.getpid())])
    stay(folder, "parent")


def forker(folder: Path) -> None:
    with forks_end_with_us():
        if os.fork() == 0:
            if os.fork() == 0:
                stay(folder, "grandchild")
            stay(folder, "child")
    if os.fork() == 0:
        stay(folder, "later")
    stay(folder, "forker")


if __name__ == "__main__":
    role, folder = sys.argv[1], Path(sys.argv[2])
    match role:
        case "child":
            end_with_parent(int(sys.argv[3]))
            stay(folder, role)
        case "rank":
            end_with_launcher()
            stay(folder, role)
        case "parent":
            parent(folder)
        case "forker":
            forker(folder)
