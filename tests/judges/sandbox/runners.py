"""Sandboxes of root and of an ordinary user, each in a process of that user."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from ranks import REPOSITORY

from grpo_mega.judges.sandbox.pool import FIX, problem
from grpo_mega.judges.sandbox.start import BoxError, interpreter

ORDINARY = 100_000 + os.getpid() % 100_000
"""User id of the ordinary user, where tests run as root; another one for tests that run at the same time."""
USERS = ("root", "user") if os.geteuid() == 0 else ("user",)
MECHANISMS = ("bubblewrap", "landlock")


@dataclass
class Runner:
    """A process with a sandbox, and who it is."""

    process: subprocess.Popen[str]
    uid: int
    python: str

    def run(self, **asked: Any) -> dict[str, Any]:
        """The outcome of a program: see driver.py."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def alive(self) -> set[int]:
        """The processes of its boxes' users, with those that have left its tree; not those that have ended."""
        boxes = {_uid(child.pid) for child in psutil.Process(self.process.pid).children(recursive=True)} - {-1}
        everyone = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return {pid for pid in everyone if _uid(pid) in boxes}


def _uid(pid: int) -> int:
    """The user of a process; -1 of one that has ended, or is ending."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return -1
    fields = dict(line.split(":", 1) for line in lines)
    return -1 if "Z" in fields["State"] else int(fields["Uid"].split()[0])


@contextmanager
def runner(mechanism: str, user: str) -> Iterator[Runner]:
    """A sandbox of a user, with one box; skips where the mechanism does not work."""
    why = problem(mechanism)  # type: ignore[arg-type]
    if why:
        pytest.skip(f"{why}. {FIX}")
    ordinary = user == "user" and os.geteuid() == 0
    folder = Path(tempfile.mkdtemp(prefix="sandbox-test-"))
    try:
        # The other user may be unable to read this repository, and this Python.
        code, no_cache = REPOSITORY / "grpo_mega" / "judges", shutil.ignore_patterns("__pycache__")
        shutil.copytree(code, folder / "grpo_mega" / "judges", ignore=no_cache)  # which others may be writing
        (folder / "grpo_mega" / "__init__.py").touch()
        shutil.copy(Path(__file__).with_name("driver.py"), folder)
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        python = _interpreter() if ordinary else sys.executable
        process = subprocess.Popen(
            [python, "-B", folder / "driver.py", mechanism],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            start_new_session=True,
            **({"user": ORDINARY, "group": ORDINARY, "extra_groups": []} if ordinary else {}),  # type: ignore[arg-type]
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield Runner(process, ORDINARY if ordinary else os.geteuid(), str(python))
        process.communicate()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        shutil.rmtree(folder)


def _interpreter() -> str:
    try:
        return interpreter(ORDINARY)[0]
    except BoxError as error:
        pytest.skip(str(error))
