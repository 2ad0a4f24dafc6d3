"""Prints what `shared_clock` gives on this rank, whose clock is OFFSET ns x RANK ahead, and whose machine is its own.

Usage: clock_job.py OFFSET RANKS_PER_MACHINE
"""

import json
import os
import sys
import time

import torch.distributed as dist

from grpo_mega import platform
from grpo_mega.platform.clock import shared_clock

offset, together = map(int, sys.argv[1:])
rank = int(os.environ["RANK"])
machine = rank // together


def ahead() -> int:
    """The clock of another machine."""
    return time.perf_counter_ns() + machine * offset


platform.join_processes(platform.start())
clock = shared_clock(ahead, f"machine {machine}")
dist.barrier()
# What the common clock says now, beside what it should say: on this one machine all have the same.
at = time.perf_counter_ns()
print(json.dumps([clock.microseconds(at + machine * offset) - at / 1e3, clock.error_us]))
dist.destroy_process_group()
