"""Number of CPUs that a rank may use for programs, derived from the limits of its container, not the whole machine."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path


def share_of_cpus() -> int:
    """CPUs for this rank's programs, at least one; the number of ranks on the node is torchrun's LOCAL_WORLD_SIZE."""
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    together = min(_cpus_of_cpuset(), quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")))
    return share(together, ranks, len(os.sched_getaffinity(0)))


def share(together: float, ranks: int, bound: int) -> int:
    """One rank's share of the CPUs that all ranks may use together; at most `bound`, the CPUs that it is bound to."""
    return max(1, min(bound, int(together / ranks)))


def _cpus_of_cpuset() -> int:
    """CPUs of this process's cpuset, regardless of its current binding (cpuset(7))."""
    cpus: list[int] = []

    # Linux binds each thread separately. A thread that asks for all CPUs gets those of the cpuset, which shows its
    # size; the wider binding ends with the thread, so the rank stays bound as it was.
    def look() -> None:
        # Where the kernel refuses the wider binding, only the CPUs that the process is bound to are known.
        with suppress(OSError):
            os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
        cpus.append(len(os.sched_getaffinity(0)))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return cpus[0]


def quota(groups: Path, root: Path) -> float:
    """CPU quota of a process, in CPUs: the smallest of its control groups; infinite without a quota.

    Args:
        groups: File /proc/PID/cgroup of the process (cgroups(7)).
        root: Where control groups are mounted. In a container its own group may be mounted there, under no name.
    """
    least = float("inf")
    with suppress(OSError):
        for line in groups.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            # The line of control groups v2 names no controllers; with v1, only the hierarchy of `cpu` has quotas.
            if controllers and "cpu" not in controllers.split(","):
                continue
            top = next((root / one for one in (controllers, "cpu") if (root / one).is_dir()), root)
            group = top / name.lstrip("/")
            # A quota of any ancestor binds as well, so the smallest counts.
            for folder in (group, *group.parents):
                if folder.is_relative_to(top):
                    least = min(least, _quota_of(folder))
    return least


def _quota_of(folder: Path) -> float:
    """CPU quota of one control group, in CPUs; infinite where there is no quota or no such group."""
    # Without a quota, cpu.max (v2) has the word "max", which is not a number, and cpu.cfs_quota_us (v1) has -1.
    with suppress(OSError, ValueError):
        if (folder / "cpu.max").exists():
            microseconds, period = map(int, (folder / "cpu.max").read_text().split())
        else:
            microseconds = int((folder / "cpu.cfs_quota_us").read_text())
            period = int((folder / "cpu.cfs_period_us").read_text())
        if microseconds > 0:
            return microseconds / period
    return float("inf")
