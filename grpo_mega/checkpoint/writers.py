"""Where the processes that write a checkpoint leave word of what they wrote.

Megatron's own queue for it lives in a process that imports torch, once for the program's main module and once for what
it is told. That takes seconds and memory on every rank, and programs without a guard around their main part run twice.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from types import ModuleType
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async


class _SealedQueue:
    """A queue in a process of its own, which knows nothing of the program and never looks into what passes through."""

    def __init__(self) -> None:
        with _without_main_module():
            self._queue = get_context("spawn").Manager().Queue()

    def put(self, item: Any) -> None:
        self._queue.put(pickle.dumps(item))

    def get_nowait(self) -> Any:
        return pickle.loads(self._queue.get_nowait())


def start_results_queue() -> None:
    """Gives Megatron's writers their queue, once per process."""
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = _SealedQueue()


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Processes spawned inside do not import the main module."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
