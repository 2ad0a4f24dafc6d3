"""Facts about processes from /proc: members of a session or process tree, threads of a user, CPU time, memory."""

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
    """CPU time that processes used and waited for since they began.

    Attributes:
        ran: Process id -> seconds of CPU time.
        reaped: Process id -> seconds of CPU time of its children that have been waited for, and of theirs.
        threads: Thread id -> (seconds that it ran, seconds that it waited for a CPU).
    """

    ran: dict[int, float] = field(default_factory=dict)
    reaped: dict[int, float] = field(default_factory=dict)
    threads: dict[int, tuple[float, float]] = field(default_factory=dict)


def session(leader: int) -> list[int]:
    """Process ids of the session of `leader`."""
    found = []
    for pid in _processes():
        with suppress(ProcessLookupError):
            if os.getsid(pid) == leader:
                found.append(pid)
    return found


def threads_of(uid: int) -> int:
    """Number of threads of all processes of a user."""
    # RLIMIT_NPROC, for which this is used, counts threads (getrlimit(2)).
    threads = 0
    for pid in _processes():
        with suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == uid:
                threads += len(os.listdir(f"/proc/{pid}/task"))
    return threads


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def tree(root: int) -> list[int]:
    """Process ids of `root` (first) and its descendants; `root` alone where Linux lists no children."""
    found, waiting = [], [root]
    while waiting:
        found.append(waiting.pop())
        # A process that has ended has no children: Linux has given them another parent.
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{found[-1]}/task"):
                waiting += map(int, Path(f"/proc/{found[-1]}/task/{thread}/children").read_text().split())
    return found


def effort(processes: Sequence[int]) -> Effort:
    """Reads the CPU and waiting time of processes that have not ended; of no threads without CONFIG_SCHED_INFO.

    Waiting times are read first, for all processes: running times, which explain them, grow while this process reads,
    which may take long on a busy machine.
    """
    found = Effort()
    for pid in processes:
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                used, queued, _ = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()
                found.threads[int(thread)] = int(used) / 1e9, int(queued) / 1e9
    for pid in processes:
        with suppress(OSError):
            # The name, in brackets, is the program's own choice and may not be text.
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            # User and system time, in clock ticks: fields 14 and 15, and 16 and 17 for reaped children
            # (proc_pid_stat(5)).
            own, reaped = (TICK * (int(fields[i]) + int(fields[i + 1])) for i in (11, 13))
            found.ran[pid], found.reaped[pid] = own, reaped
    return found


def waited(before: Effort, after: Effort) -> float:
    """Seconds between two readings that processes waited for a CPU used by others; negative where they ran in parallel.

    The wait of the thread that waited longest, less what the processes themselves ran meanwhile: waiting for each other
    does not count. Never more than that thread's time in the kernel's run queue.
    """
    ran, of_threads = _ran(before, after), [-math.inf]
    for thread, (used, queued) in after.threads.items():
        used_before, queued_before = before.threads.get(thread, (0.0, 0.0))
        in_queue = queued - queued_before
        # `ran` includes this thread's own time, which is added back: only what the others ran explains its wait.
        of_threads.append(min(in_queue, in_queue + (used - used_before) - ran))
    return max(of_threads) if after.threads else -ran


def _ran(before: Effort, after: Effort) -> float:
    """CPU seconds of processes between two readings, those of reaped children included.

    Of a child that ended, only the time beyond the previous reading is added. A child that is never reaped subtracts
    nothing.
    """
    own = sum(seconds - before.ran.get(pid, 0.0) for pid, seconds in after.ran.items())
    reaped = sum(seconds - before.reaped.get(pid, 0.0) for pid, seconds in after.reaped.items())
    ended = sum(before.ran[pid] + before.reaped[pid] for pid in before.ran.keys() - after.ran.keys())
    return own + max(0.0, reaped - ended)


def resident_bytes(processes: Sequence[int]) -> int:
    """Bytes of memory in use by processes.

    Pages that processes share are counted once, in shares (Pss, proc_pid_smaps(5)). Where this process may not see a
    program's mappings, as root without CAP_SYS_PTRACE, pages of memory that forks have in common are counted for each.
    """
    used = 0
    for pid in processes:
        with suppress(OSError):
            used += _bytes_of(pid)
    return used


def _bytes_of(pid: int) -> int:
    """A process's share of the memory in use, else its whole resident memory; raises OSError if it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return PAGE * int(Path(f"/proc/{pid}/statm").read_text().split()[1])
