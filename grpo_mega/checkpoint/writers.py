"""How the processes that write a checkpoint report to the rank that forked them: results of Megatron, and checksums.

Megatron's own queue for its results needs two more processes. Both import torch, which takes seconds and memory on
every rank, and they outlive a rank that is killed.
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

from grpo_mega.platform.collectives import host_group
from grpo_mega.platform.manifest import Sums, checksum

SECONDS_BETWEEN_POLLS = 0.05


class ForkedQueue:
    """A queue in memory that a process shares with its forks.

    Only one process may put at a time. It may have ended before its item is taken.
    """

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
        items = []
        try:
            while True:
                items.append(self.get_nowait())
        except queue.Empty:
            return items

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

    `folder` is where the process writes the files of this rank. It reads them while they are still in the page cache,
    and while training continues if the checkpoint is saved in the background.
    """
    write, rank = request.async_fn, dist.get_rank()
    if write is None:  # other ranks write what this one holds
        return request

    def write_and_sum(*arguments: Any) -> None:
        write(*arguments)
        sums.put((folder.name, _sums([*folder.glob(f"__{rank}_*")])))

    return request._replace(async_fn=write_and_sum)


def in_one_process(requests: Sequence[AsyncRequest]) -> AsyncRequest:
    """One request that does the work of several, one after the other in the same process.

    The tensors of all requests are copied to the host before the process starts, so it writes what was true then.
    """
    if all(request.async_fn is None for request in requests):
        write, preload = None, None
    else:

        def preload() -> list[Any]:
            return [request.preload_fn() if request.preload_fn else None for request in requests]

        def write(_: None, preloaded: list[Any], __: None) -> None:
            for request, buckets in zip(requests, preloaded, strict=True):
                if request.async_fn is not None:
                    rank, _, results = request.async_fn_args
                    request.async_fn(rank, buckets, results)

    finalizers = [finalize for request in requests for finalize in request.finalize_fns]
    return AsyncRequest(write, (None, None, None), finalizers, preload_fn=preload)


def waiting_on_hosts(request: AsyncRequest) -> AsyncRequest:
    """The request, for execution in this process, with a barrier of all ranks over the hosts' network at its end.

    Megatron's own barrier is over the devices: a rank that has nothing to write would give up after the timeout of
    collectives while others still write.
    """
    write = request.async_fn

    def write_and_wait(*arguments: Any) -> None:
        if write is not None:
            write(*arguments)
        dist.barrier(host_group())

    return request._replace(async_fn=write_and_wait)


def finalized(calls: AsyncCallsQueue, wait: bool) -> bool:
    """Whether the writing processes of all ranks are done and Megatron has finalized; every rank must call it.

    With `wait`, ranks poll until that is so. A rank whose files are written does not wait in a collective: it would
    time out while others still write.
    """
    while calls.get_num_unfinalized_calls():
        calls.maybe_finalize_async_calls(blocking=False)
        if not wait:
            break
        time.sleep(SECONDS_BETWEEN_POLLS)
    return not calls.get_num_unfinalized_calls()


def _sums(files: list[Path]) -> Sums:
    """{name: checksum} of the files that exist; Megatron itself reports a file that could not be written."""
    with ThreadPoolExecutor(max_workers=max(1, len(files))) as pool:
        sums = zip(files, pool.map(checksum, files), strict=True)
        return {file.name: of_file for file, of_file in sums if of_file}
