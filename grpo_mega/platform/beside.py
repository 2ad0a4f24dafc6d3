"""Background programs of this package that serve training: each ends with its parent, runs at low priority, and fails
alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_mega.platform.orphans import end_with_parent


def start_beside(module: str, words: Sequence[str | Path], log: Path) -> subprocess.Popen[bytes]:
    """Starts `python -m MODULE WORDS --parent ID`, which calls `come_after` first; the main thread must call it.

    Its standard input is a pipe; its output is appended to `log`, whose folder is created. It has its own session, so
    that its children can be killed with it.

    Raises:
        OSError: The program cannot be started.
    """
    packages = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(packages), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    log.parent.mkdir(exist_ok=True)
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", module, *words, "--parent", str(os.getpid())],
            env=os.environ | own,
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def come_after(parent: int) -> None:
    """Makes this program end with its parent, and lowers its priority."""
    end_with_parent(parent)
    os.nice(10)
