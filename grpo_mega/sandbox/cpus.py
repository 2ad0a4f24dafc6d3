"""How many CPUs a rank has for programs: of those that its container may use, not of all that the machine has."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path


def share_of_cpus() -> int:
    """CPUs for this rank's programs, at least one; how many ranks there are LOCAL_WORLD_SIZE says, as of torchrun."""
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    together = min(_cpus_of_cpuset(), quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")))
    return share(together, ranks, len(os.sched_getaffinity(0)))


def share(together: float, ranks: int, bound: int) -> int:
    """Of the CPUs that all ranks may use together those of one; a rank that is bound to fewer has these."""
    return max(1, min(bound, int(together / ranks)))


def _cpus_of_cpuset() -> int:
    """CPUs that this process could be bound to: of its cpuset, whatever it is bound to now (cpuset(7))."""
    found: list[int] = []

    def look() -> None:  # in a thread, whose binding ends with it
        with suppress(OSError):  # refused: then only those that it is bound to are known
            os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
        found.append(len(os.sched_getaffinity(0)))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


def quota(groups: Path, root: Path) -> float:
    """CPUs whose time a process may use in all, by the quotas of its control groups; infinite without one.

    Args:
        groups: Its groups, as /proc/PID/cgroup has them (cgroups(7)).
        root: Where control groups are mounted. In a container its own group may be mounted there, under no name.
    """
    least = float("inf")
    with suppress(OSError):
        for line in groups.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            top = next((root / one for one in (controllers, "cpu") if (root / one).is_dir()), root)
            group = top / name.lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(top):
                    least = min(least, _quota_of(folder))
    return least


def _quota_of(folder: Path) -> float:
    """CPUs by the quota of one group; infinite where there is none, or no such group."""
    with suppress(OSError, ValueError):  # "max" is no number
        if (folder / "cpu.max").exists():
            microseconds, period = map(int, (folder / "cpu.max").read_text().split())
        else:
            microseconds = int((folder / "cpu.cfs_quota_us").read_text())
            period = int((folder / "cpu.cfs_period_us").read_text())
        if microseconds > 0:  # -1: none
            return microseconds / period
    return float("inf")
