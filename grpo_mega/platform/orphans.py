"""Processes that end with the one they work for, however that one ends; kill -9 included.

A process that is killed cannot tell its children, and they live on: ranks without their torchrun would train on and
write into the run directory, helpers would stay for good. So every process that works for another asks the kernel for
its own end, or looks once a second where the kernel cannot be asked. Only the standard library is needed, but for
`end_with_launcher`: processes that must start quickly can use this file too.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

SECONDS_BETWEEN_LOOKS = 1.0
"""How long a process may outlive the one it looks after."""
PR_SET_PDEATHSIG = 1
"""prctl's name for it, on Linux."""
MARK = "TORCHELASTIC_RUN_ID"
"""Environment variable that torchrun gives its ranks, and does not have itself."""
_C = ctypes.CDLL(None, use_errno=True)
"""Opened now: in a fork of a process with threads the loader may be locked for good."""
_forking: int | None = None
"""The process whose forks end with it; None outside of `forks_end_with_us`."""


def end_with_parent(parent: int) -> None:
    """Kills this process, with SIGKILL, as soon as its parent ends or if it has ended already.

    Linux takes the parent's *thread* that started this process for the parent: the caller sees to it that this thread
    lives as long as the parent does (the main thread, usually). Forks of this process do not inherit the wish.

    Args:
        parent: The process that started this one, as that one knows itself (`os.getpid()` there): what `os.getppid()`
            says here may already be the one that takes in orphans.
    """
    if sys.platform == "linux":
        if _C.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        if os.getppid() != parent:  # it ended before the kernel was asked
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        _end_when(lambda: os.getppid() != parent)


def end_with_launcher() -> None:
    """A rank that torchrun started ends with it; any other process stays as it is.

    torchrun gives each rank a session: the rank is its leader, or a child of it where torchrun was told to start a
    script that starts the rank. A training process that was started from a shell, by nohup or over ssh has no torchrun,
    and outlives whatever started it.
    """
    import psutil

    try:
        leader = psutil.Process(os.getsid(0))
        if MARK not in leader.environ():
            return
    except psutil.Error:  # somebody else's session, or one whose leader has left it
        return
    launcher = leader.parent()
    if launcher is None:
        os.kill(os.getpid(), signal.SIGKILL)
    elif leader.pid == os.getpid():
        end_with_parent(launcher.pid)
    else:

        def ended() -> bool:
            try:
                return not launcher.is_running() or launcher.status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                return True

        _end_when(ended)


@contextmanager
def forks_end_with_us() -> Iterator[None]:
    """Processes forked inside end with this one, and what they fork with them.

    For those that a library forks, in which nothing of ours runs. To be called by the main thread, see
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
        end_with_parent(_forking)
        _forking = os.getpid()


os.register_at_fork(after_in_child=_after_fork)


def _end_when(gone: Callable[[], bool]) -> None:
    """Looks from a thread, which goes on whatever this process does in the meantime."""

    def look() -> None:
        while True:
            with suppress(Exception):  # who cannot be looked at, with no descriptor left for instance, may yet live
                if gone():
                    break
            time.sleep(SECONDS_BETWEEN_LOOKS)
        os.write(2, b"this process ends: the one that it works for is gone\n")
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=look, name="end-with-launcher", daemon=True).start()
