"""What /proc says of processes: who belongs to a session, to a user, to a tree, what they use and wait for."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")
TICK = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Effort:
    """What processes have done and wanted to do since they began.

    Attributes:
        ran: Process id -> seconds of CPU time.
        reaped: Process id -> seconds of CPU time of the children that it has waited for, and of theirs.
        threads: Thread id -> (seconds that it ran, seconds that it waited for a CPU).
    """

    ran: dict[int, float] = field(default_factory=dict)
    reaped: dict[int, float] = field(default_factory=dict)
    threads: dict[int, tuple[float, float]] = field(default_factory=dict)


def session(leader: int) -> list[int]:
    """Process ids of a session's processes."""
    return [pid for pid in _processes() if _session_of(pid) == leader]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def threads_of(uid: int) -> int:
    """Threads of all processes of a user."""
    threads = 0
    for pid in _processes():
        with suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == uid:
                threads += len(os.listdir(f"/proc/{pid}/task"))
    return threads


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def tree(root: int) -> list[int]:
    """Process ids of `root`, first, and of all that it has started, and theirs; `root` alone where Linux lists none."""
    found, waiting = [], [root]
    while waiting:
        found.append(waiting.pop())
        waiting += _children(found[-1])
    return found


def effort(processes: Sequence[int]) -> Effort:
    """What processes have done; nothing of those that have ended. Without CONFIG_SCHED_INFO no thread is there.

    What they waited is read first, of all of them: what they ran explains it, and goes on while this process reads,
    which on a busy machine may take long.
    """
    found = Effort()
    for pid in processes:
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                used, queued, _ = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()
                found.threads[int(thread)] = int(used) / 1e9, int(queued) / 1e9
    for pid in processes:
        with suppress(OSError):
            # The name, in brackets, is the program's own choice and may be no text.
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            own, reaped = (TICK * (int(fields[i]) + int(fields[i + 1])) for i in (11, 13))  # proc_pid_stat(5)
            found.ran[pid], found.reaped[pid] = own, reaped
    return found


def waited(before: Effort, after: Effort) -> float:
    """Seconds that processes waited for a CPU which others had, between two looks; below 0 where they ran side by side.

    Of the thread that waited for longest, as far as none of the processes ran meanwhile: those that only are in each
    other's way have not waited for others. It is never more than a thread was in the kernel's queue.
    """
    ran, of_threads = _ran(before, after), [-math.inf]
    for thread, (used, queued) in after.threads.items():
        used_before, queued_before = before.threads.get(thread, (0.0, 0.0))
        in_queue = queued - queued_before
        of_threads.append(min(in_queue, in_queue + (used - used_before) - ran))
    return max(of_threads) if after.threads else -ran


def _ran(before: Effort, after: Effort) -> float:
    """CPU time of processes between two looks: of those that are there, and of children that were waited for.

    A child that ended was seen to run before; only what its parent has got of it beyond that is new. One that nobody
    waits for takes nothing back.
    """
    own = sum(seconds - before.ran.get(pid, 0.0) for pid, seconds in after.ran.items())
    reaped = sum(seconds - before.reaped.get(pid, 0.0) for pid, seconds in after.reaped.items())
    ended = sum(before.ran[pid] + before.reaped[pid] for pid in before.ran.keys() - after.ran.keys())
    return own + max(0.0, reaped - ended)


def resident_bytes(processes: Sequence[int]) -> int:
    """Memory that is in use by processes.

    Pages that processes share are counted once, in shares (Pss, proc_pid_smaps(5)). Where this process may not see a
    program's mappings, as root without CAP_SYS_PTRACE, pages of memory that forks have in common are counted for each.
    """
    used = 0
    for pid in processes:
        with suppress(OSError):
            used += _bytes_of(pid)
    return used


def _bytes_of(pid: int) -> int:
    """A process' share of the memory in use, else all that it uses; raises OSError of one that has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return PAGE * int(Path(f"/proc/{pid}/statm").read_text().split()[1])


def _children(pid: int) -> list[int]:
    """The processes that a process' threads have started; none of one that has ended."""
    started: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            started += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return started
