"""Ends processes together with the process that they work for, even if that is killed by kill -9.

A killed process cannot tell its children, so they live on: ranks without their torchrun would continue to train and to
write into the run directory, and helpers would never end. So every process that works for another asks the kernel to be
killed with it or, where the kernel cannot do that, checks once a second whether the other still runs. Only the
standard library is needed, except for `end_with_launcher`: processes that must start quickly can use this file too.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

SECONDS_BETWEEN_CHECKS = 1.0
"""Seconds between checks, and so the longest time by which a process may outlive its owner."""
PR_SET_PDEATHSIG = 1
"""prctl's number for the parent-death signal, on Linux."""
MARK = "TORCHELASTIC_RUN_ID"
"""Environment variable that torchrun sets for its ranks, and does not have itself."""
_C = ctypes.CDLL(None, use_errno=True)
"""The C library, loaded at import: in a fork of a process with threads, the loader's lock may be held forever."""
_forking: int | None = None
"""Process whose forks end with it; None outside of `forks_end_with_us`."""


def end_with_parent(parent: int) -> None:
    """Kills this process, with SIGKILL, as soon as its parent ends, or if it has already ended.

    For Linux the parent is the *thread* that started this process: the caller must make sure that this thread lives as
    long as the parent process (usually the main thread). Forks of this process do not inherit this.

    Args:
        parent: Process id of the process that started this one, from `os.getpid()` there: `os.getppid()` here may
            already return the process that adopts orphans.
    """
    if sys.platform == "linux":
        if _C.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        # The parent may have ended before the signal was set, and the kernel sends it only for later ends.
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        _end_when(lambda: os.getppid() != parent)


def end_with_launcher() -> None:
    """Makes a rank that torchrun started end with torchrun; does nothing in any other process.

    torchrun gives each rank a session: the rank is its leader, or a child of the leader where torchrun starts a script
    that starts the rank. A training process that was started from a shell, by nohup or over ssh has no torchrun,
    and outlives whatever started it.
    """
    import psutil

    try:
        leader = psutil.Process(os.getsid(0))
        if MARK not in leader.environ():
            return
    except psutil.Error:
        # The session is another user's, or its leader has ended: no torchrun of ours.
        return
    launcher = leader.parent()
    # Without a parent, torchrun has already ended, and nothing would end this rank later.
    if launcher is None:
        os.kill(os.getpid(), signal.SIGKILL)
    elif leader.pid == os.getpid():
        end_with_parent(launcher.pid)
    else:
        # The launcher is not this process's parent but its grandparent, which the kernel does not watch.
        def ended() -> bool:
            try:
                return not launcher.is_running() or launcher.status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                return True

        _end_when(ended)


@contextmanager
def forks_end_with_us() -> Iterator[None]:
    """Context in which forked processes are made to end with this one, and their forks with them.

    For processes forked by a library, which do not run this project's code. The main thread must call it, see
    `end_with_parent`.
    """
    global _forking
    _forking = os.getpid()
    try:
        yield
    finally:
        _forking = None


def _after_fork() -> None:
    global _forking
    if _forking is not None:
        # The kernel clears the setting in every fork, so each fork asks anew, for the process that forked it.
        end_with_parent(_forking)
        _forking = os.getpid()


os.register_at_fork(after_in_child=_after_fork)


def _end_when(gone: Callable[[], bool]) -> None:
    """Kills this process as soon as `gone()`; checks from a thread, independent of what the process does."""

    def check() -> None:
        while True:
            # A failed check, e.g. for lack of free descriptors, proves nothing, and must not end the thread.
            with suppress(Exception):
                if gone():
                    break
            time.sleep(SECONDS_BETWEEN_CHECKS)
        # Not through sys.stderr: the main thread may hold its lock forever.
        os.write(2, b"this process ends: the one that it works for has ended\n")
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=check, name="end-with-launcher", daemon=True).start()


def start_beside(module: str, words: Sequence[str | Path], log: Path) -> subprocess.Popen[bytes]:
    """Starts `python -m MODULE WORDS --parent ID`, which calls `come_after` first; the main thread must call it.

    Its standard input is a pipe; its output is appended to `log`, whose folder is created. It has its own session, so
    that its children can be killed with it.

    Raises:
        OSError: The program cannot be started.
    """
    packages = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    # The helper must find this package from any working directory, and must take no GPU and no more than one core from
    # the ranks.
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
