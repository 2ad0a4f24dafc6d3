"""Two ranks of which the main one takes longer than collectives may: the other waits for it. Usage: ... FILE

FILE is written when both went on. A single rank instead waits for a process that hangs, and says how that ended."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

from grpo_mega import platform

HERE = platform.start()

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest  # noqa: E402

from grpo_mega.checkpoint.writers import finalized, waiting_on_hosts  # noqa: E402
from grpo_mega.platform import collectives  # noqa: E402
from grpo_mega.platform.orphans import forks_end_with_us  # noqa: E402

PATIENCE = 2.0
"""Seconds for which a single rank waits."""
SHORT = 8
"""Seconds that collectives of the job may take."""


def outlast(seconds: float) -> None:
    """Work on the main rank, as long as the writing of a large file."""
    end = time.monotonic() + seconds
    while dist.get_rank() == 0 and time.monotonic() < end:
        hashlib.sha256(bytes(1_000_000))


def wait_in_vain(folder: Path) -> None:
    calls = AsyncCallsQueue()
    with forks_end_with_us():
        calls.schedule_async_request(AsyncRequest(signal.pause, (), []))
    try:
        finalized(calls, True, folder, PATIENCE)
    except TimeoutError as error:
        print(error, flush=True)
    os._exit(0)


if __name__ == "__main__":
    dist.init_process_group(HERE.backend, timeout=timedelta(seconds=300))
    if dist.get_world_size() == 1:
        wait_in_vain(Path(sys.argv[1]).parent)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=SHORT), dist.group.WORLD)
    collectives.succeed_together(lambda: outlast(2 * SHORT))
    # Rewards take their time, too, and may be computed while the devices' process groups are suspended.
    assert collectives.from_all_ranks(lambda: outlast(2 * SHORT) or dist.get_rank()) == [0, 1]
    slow = AsyncRequest(partial(outlast, 2 * SHORT), (), [dist.barrier])
    waiting_on_hosts(slow if dist.get_rank() == 0 else slow._replace(async_fn=None)).execute_sync()
    calls = AsyncCallsQueue()
    with forks_end_with_us():
        calls.schedule_async_request(slow)
    folder = Path(sys.argv[1]).parent
    assert not finalized(calls, False, folder)
    assert finalized(calls, True, folder)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text("both ranks went on")
