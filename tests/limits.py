"""Time limits of tests for what may hang, which follow the measured speed of the machine.

Limits are written for the machine on which the suite was timed first. Another one, or one that is shared, may
need several times as long for the same work, so every limit is stretched by the time of a fixed piece of work here.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from functools import cache

NORMAL = 0.0225
"""Seconds that `_work` takes on the machine the limits are written for, when nothing else runs there."""


def limit(seconds: float) -> float:
    """`seconds` on the normal machine, stretched to this one; never shorter."""
    return seconds * slowness()


@cache
def slowness() -> float:
    """How many times longer this machine takes than the normal one, in wall-clock time; at least 1.

    Where several files are tested at once, each may have to wait for all others.
    """
    at_once = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return at_once * max(1.0, statistics.median(_work() for _ in range(7)) / NORMAL)


def _work() -> float:
    """Seconds by the wall clock for interpreted code and for compiled code that reads memory."""
    start = time.perf_counter()
    sum(i * i for i in range(250_000))
    hashlib.sha256(bytes(8_000_000)).digest()
    return time.perf_counter() - start


if __name__ == "__main__":  # in percent, for .ci/run
    print(round(100 * slowness()))
