"""Processes that end while a test looks at them: every question here has an answer also for one that is gone."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable

import psutil
from limits import limit


def there(numbers: Iterable[int]) -> list[psutil.Process]:
    """Those of these numbers that are there."""
    found = []
    for number in numbers:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(number))
    return found


def alive(process: psutil.Process) -> bool:
    """Whether it has not ended; one that nobody has waited for yet has."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def left(processes: Iterable[psutil.Process], seconds: float = 60) -> list[psutil.Process]:
    """Those that have not ended within `limit(seconds)` seconds."""
    return [process for process in psutil.wait_procs([*processes], timeout=limit(seconds))[1] if alive(process)]


def kill(process: psutil.Process, number: int = signal.SIGKILL) -> None:
    """Sends it a signal, if it is there."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def tree(number: int) -> list[psutil.Process]:
    """A process and all that it has started; nothing of one that is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [process := psutil.Process(number), *process.children(recursive=True)]
    return []
