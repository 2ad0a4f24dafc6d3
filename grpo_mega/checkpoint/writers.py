"""What the processes that write a checkpoint leave for the one that they are forks of: what they wrote, and its sums.

Megatron's own queue for it lives in two more processes. They import torch, once for the program's main module and once
for what they are told, which takes seconds and memory on every rank; and they outlive a rank that is killed.
"""

from __future__ import annotations

import os
import pickle
import queue
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest

from grpo_mega.checkpoint.integrity import Sums, checksum
from grpo_mega.platform.collectives import host_group

SECONDS_BETWEEN_LOOKS = 0.05


class ForkedQueue:
    """A queue in memory that a process shares with its forks: one of them at a time puts, and may be gone by then."""

    def __init__(self) -> None:
        self._file = os.memfd_create("checkpoint-results")
        self._read = 0

    def put(self, item: Any) -> None:
        """Adds anything that can be pickled."""
        with os.fdopen(os.dup(self._file), "ab") as file:
            pickle.dump(item, file)

    def get_nowait(self) -> Any:
        """The oldest item that was not taken yet, by this process.

        Raises:
            queue.Empty: There is none, or the process that put it was killed half-way.
        """
        with os.fdopen(os.dup(self._file), "rb") as file:
            file.seek(self._read)
            try:
                item = pickle.load(file)
            except (EOFError, pickle.UnpicklingError):
                raise queue.Empty from None
            self._read = file.tell()
        return item

    def all(self) -> list[Any]:
        """Every item that was not taken yet."""
        found = []
        try:
            while True:
                found.append(self.get_nowait())
        except queue.Empty:
            return found

    def close(self) -> None:
        """Gives the memory back."""
        os.close(self._file)


def start_results_queue() -> None:
    """Gives Megatron's writers a queue for one checkpoint."""
    if filesystem_async._results_queue is not None:
        filesystem_async._results_queue.close()
    filesystem_async._results_queue = ForkedQueue()


def summing(request: AsyncRequest, folder: Path, sums: ForkedQueue) -> AsyncRequest:
    """The request, whose writing process also puts (name of `folder`, {name of a file: its checksum}) into `sums`.

    `folder` is where it writes; the files are those of this rank. They are read while they are still in the memory of
    this node and, where training goes on meanwhile, beside it.
    """
    write, rank = request.async_fn, dist.get_rank()
    if write is None:  # other ranks write what this one holds
        return request

    def write_and_sum(*arguments: Any) -> None:
        write(*arguments)
        sums.put((folder.name, _sums([*folder.glob(f"__{rank}_*")])))

    return request._replace(async_fn=write_and_sum)


def waiting_on_hosts(request: AsyncRequest) -> AsyncRequest:
    """The request, to be executed in this process, after which ranks wait for each other over their hosts.

    Megatron has them wait over their devices: those that have nothing to write would give up after the timeout of
    collectives, however well the others get on.
    """
    write = request.async_fn

    def write_and_wait(*arguments: Any) -> None:
        if write is not None:
            write(*arguments)
        dist.barrier(host_group())

    return request._replace(async_fn=write_and_wait)


def finalized(calls: AsyncCallsQueue, wait: bool) -> bool:
    """Whether the processes of all ranks have written and Megatron has been told so; every rank must call it.

    With `wait`, ranks look again and again: one whose files are written would otherwise wait for the others in a
    collective, as above.
    """
    while calls.get_num_unfinalized_calls():
        calls.maybe_finalize_async_calls(blocking=False)
        if not wait:
            break
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return not calls.get_num_unfinalized_calls()


def _sums(files: list[Path]) -> Sums:
    """{name: checksum}; a file that could not be written is missed by who asked for it."""
    with ThreadPoolExecutor(max_workers=max(1, len(files))) as pool:
        found = zip(files, pool.map(checksum, files), strict=True)
        return {file.name: one for file, one in found if one}
