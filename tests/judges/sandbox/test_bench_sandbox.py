"""tools/bench_sandbox.py: a line for every mechanism, and for interpreters that nothing contains."""

from __future__ import annotations

import subprocess
import sys

from ranks import REPOSITORY

from grpo_mega.judges.sandbox.pool import MECHANISMS, problem


def test_it_measures_every_mechanism() -> None:
    command = [sys.executable, "tools/bench_sandbox.py", "--programs", "6", "--boxes", "2", "--milliseconds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert (done.returncode, done.stderr) == (0, "")
    for name in (*MECHANISMS, "python -c"):
        line = next(line for line in done.stdout.splitlines() if line.startswith(name))
        if name == "python -c" or not problem(name):
            assert all(float(number) > 0 for number in line.removeprefix(name).split()), line
