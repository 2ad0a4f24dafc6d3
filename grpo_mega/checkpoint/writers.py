"""Reports from the processes that write a checkpoint to the rank that forked them: Megatron's results, and checksums.

Megatron's own queue for its results needs two more processes per rank. Both import torch, which takes seconds and
memory, and they outlive a rank that is killed.
"""

from __future__ import annotations

import os
import pickle
import queue
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest

from grpo_mega.platform.collectives import from_main_rank, host_group
from grpo_mega.platform.manifest import checksum

SECONDS_BETWEEN_POLLS = 0.05
SECONDS_WITHOUT_A_BYTE = 3600.0
"""Seconds for which the files of a checkpoint may stay unchanged while ranks wait for them. The limit is long because a
slow disk may take long to sync the files, and because their checksums are computed by reading them back. There must be
one because the writing processes are forks of a process with threads: a lock that a thread held at the fork is never
released in the fork, which may wait for it forever."""


class ForkedQueue:
    """A queue in memory that a process shares with its forks.

    Only one process may put at a time. The process may end before its item is taken.
    """

    def __init__(self) -> None:
        # A file in memory outlives the process that writes it, and needs no process to serve it. Forks inherit its
        # descriptor.
        self._file = os.memfd_create("checkpoint-results")
        self._read = 0

    def put(self, item: Any) -> None:
        """Adds an item that can be pickled."""
        with os.fdopen(os.dup(self._file), "ab") as file:
            pickle.dump(item, file)

    def get_nowait(self) -> Any:
        """Takes the oldest item.

        Raises:
            queue.Empty: There is no item, or its process was killed while writing it.
        """
        # A duplicate shares the offset with the original, so the position of the next item is kept here and sought
        # every time.
        with os.fdopen(os.dup(self._file), "rb") as file:
            file.seek(self._read)
            try:
                item = pickle.load(file)
            except (EOFError, pickle.UnpicklingError):
                raise queue.Empty from None
            self._read = file.tell()
        return item

    def all(self) -> list[Any]:
        """Takes all items."""
        items = []
        try:
            while True:
                items.append(self.get_nowait())
        except queue.Empty:
            return items

    def close(self) -> None:
        """Frees the memory."""
        os.close(self._file)


def start_results_queue() -> None:
    """Gives Megatron's writers a queue for one checkpoint."""
    # Megatron creates its queue, with a manager process, only if this variable is None.
    if filesystem_async._results_queue is not None:
        filesystem_async._results_queue.close()
    filesystem_async._results_queue = ForkedQueue()


def summing(request: AsyncRequest, folder: Path, sums: ForkedQueue) -> AsyncRequest:
    """Extends a request so that its writing process also puts (name of `folder`, {file name: checksum}) into `sums`.

    `folder` has the files that the process writes for this rank. They are read back from the page cache, in the
    background if the checkpoint is saved in the background.
    """
    write, rank = request.async_fn, dist.get_rank()
    if write is None:  # other ranks write the data that this one holds
        return request

    def write_and_sum(*arguments: Any) -> None:
        write(*arguments)
        files = [*folder.glob(f"__{rank}_*")]
        with ThreadPoolExecutor(max_workers=max(1, len(files))) as pool:
            found = zip(files, pool.map(checksum, files), strict=True)
            # Files that could not be written have none; Megatron itself reports them.
            sums.put((folder.name, {file.name: of_file for file, of_file in found if of_file}))

    return request._replace(async_fn=write_and_sum)


def in_one_process(requests: Sequence[AsyncRequest]) -> AsyncRequest:
    """Joins several requests into one, which does their work one after the other in one process.

    The tensors of all requests are copied to the host before the process starts, so it writes the state of that moment.
    """
    # A rank without anything to write must start no process, which Megatron recognises by the missing function.
    if all(request.async_fn is None for request in requests):
        write, preload = None, None
    else:

        def preload() -> list[Any]:
            return [request.preload_fn() if request.preload_fn else None for request in requests]

        # Megatron passes the result of preload as the second of exactly three arguments.
        def write(_: None, preloaded: list[Any], __: None) -> None:
            for request, buckets in zip(requests, preloaded, strict=True):
                if request.async_fn is not None:
                    rank, _, results = request.async_fn_args
                    request.async_fn(rank, buckets, results)

    finalizers = [finalize for request in requests for finalize in request.finalize_fns]
    return AsyncRequest(write, (None, None, None), finalizers, preload_fn=preload)


def waiting_on_hosts(request: AsyncRequest) -> AsyncRequest:
    """Adds a barrier of all ranks, over the hosts' network, to a request that this process executes itself.

    Megatron's own barrier is over the devices: a rank with nothing to write would time out while others still write.
    """
    write = request.async_fn

    def write_and_wait(*arguments: Any) -> None:
        if write is not None:
            write(*arguments)
        dist.barrier(host_group())

    return request._replace(async_fn=write_and_wait)


def finalized(calls: AsyncCallsQueue, wait: bool, folder: Path, patience: float = SECONDS_WITHOUT_A_BYTE) -> bool:
    """Whether the writing processes of all ranks are done and Megatron has finalized; every rank must call it.

    With `wait`, ranks poll until then. A rank that has finished does not wait in a collective, which would time out
    while others still write.

    Raises:
        TimeoutError: Nothing in `folder`, where they write, has changed for `patience` seconds.
    """
    # One rank judges whether the files still grow, since sizes on a shared file system may differ between ranks, which
    # must all raise or none.
    before, since, turns = -1, time.monotonic(), 0

    def stalled() -> bool:
        nonlocal before, since
        try:
            there = sum(entry.stat().st_size for entry in folder.rglob("*") if not entry.is_dir())
        except OSError:
            there = -1  # a file that disappeared while the folder was listed counts as a change
        if there != before:
            before, since = there, time.monotonic()
        return time.monotonic() - since > patience

    # The folder is listed ten times per patience, not at every poll: listing thousands of files on a network file
    # system is slow.
    between_looks = max(1, int(patience / 10 / SECONDS_BETWEEN_POLLS))
    while calls.get_num_unfinalized_calls():
        # All ranks exchange here, so they count the same turns and enter `from_main_rank` below together.
        calls.maybe_finalize_async_calls(blocking=False)
        if not wait:
            break
        time.sleep(SECONDS_BETWEEN_POLLS)
        turns += 1
        if turns % between_looks == 0 and from_main_rank(stalled):
            raise TimeoutError(f"the processes that write it have written nothing for {patience:,.0f} s, and still run")
    return not calls.get_num_unfinalized_calls()
