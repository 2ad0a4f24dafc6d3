"""`tools/bench_kernels.py --check` finds this project's kernels right on every trap, here."""

from __future__ import annotations

import os
import subprocess
import sys

from ranks import REPOSITORY


def test_check():
    done = subprocess.run(
        [sys.executable, "tools/bench_kernels.py", "--check"],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "kernels")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all right" in done.stdout
    assert done.stdout.count("everybody right") == 8
