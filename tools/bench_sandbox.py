"""Measures how many programs a second the sandbox runs, with each mechanism that works here.

    python tools/bench_sandbox.py
    python tools/bench_sandbox.py --boxes 2 --programs 2000 --milliseconds 0

Every program computes for 5 ms of CPU time and ends, so the cost of a fresh, contained process is measured. "per core"
is programs per second of CPU time of this process and its boxes together, which hardly depends on other jobs on the
machine; "per second" and the latencies are wall time. "python -c" starts an interpreter for each program and contains
nothing.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from grpo_mega.judges.sandbox import Sandbox, SandboxUnavailable
from grpo_mega.judges.sandbox.pool import MECHANISMS

PROGRAM = """
import time
end = time.process_time() + {seconds}
while time.process_time() < end: pass
print("done")
"""


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boxes", type=int, default=1, help="programs at once, 1 by default")
    parser.add_argument("--programs", type=int, default=500, help="programs in all, 500 by default")
    parser.add_argument("--milliseconds", type=float, default=5.0, help="CPU time of a program, 5 by default")
    options = parser.parse_args()
    source = PROGRAM.format(seconds=options.milliseconds / 1000)
    print(f"{os.uname().release}, {options.boxes} at once, {options.programs} programs of {options.milliseconds:g} ms")
    print(f"{'':<14}{'per core':>10}{'per second':>12}{'median ms':>11}{'p95 ms':>9}{'start ms':>10}")
    for mechanism in MECHANISMS:
        try:
            sandbox = Sandbox(options.boxes, mechanism)
        except SandboxUnavailable as missing:
            print(f"{mechanism:<14}{missing}")
            continue
        measure(mechanism, lambda: sandbox.python(source).stdout, options.boxes, options.programs, sandbox.close)  # noqa: B023
    command = [sys.executable, "-I", "-S", "-c", source]
    measure("python -c", lambda: subprocess.run(command, capture_output=True).stdout, options.boxes, options.programs)


def measure(name: str, run: Callable[[], bytes], at_once: int, programs: int, end: Callable[[], object] = int) -> None:
    """Runs programs, `at_once` at a time, and prints a line of the table."""
    before = cpu_seconds()

    def one(_: int) -> float:
        began = time.perf_counter()
        if run() != b"done\n":
            raise RuntimeError(f"{name}: a program did not print what it should")
        return time.perf_counter() - began

    with ThreadPoolExecutor(at_once) as threads:
        # The first programs also start the boxes, and are shown in a separate column.
        first = max(threads.map(one, range(at_once)))
        began = time.perf_counter()
        seconds = sorted(threads.map(one, range(programs)))
    took = time.perf_counter() - began
    # The system counts a box's CPU time here only once the box has ended.
    end()
    per_core = (programs + at_once) / (cpu_seconds() - before)
    middle, late = statistics.median(seconds), seconds[int(0.95 * len(seconds))]
    row = f"{per_core:>10.0f}{programs / took:>12.0f}{1e3 * middle:>11.1f}{1e3 * late:>9.1f}{1e3 * first:>10.0f}"
    print(f"{name:<14}{row}", flush=True)


def cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


if __name__ == "__main__":
    main()
