"""A program without a guard around its main part: whatever imports it as a main module runs it once more."""

import multiprocessing
import queue

import psutil
from torch.distributed.checkpoint.metadata import MetadataIndex

from grpo_mega import platform

platform.start()

from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402

from grpo_mega.checkpoint.writers import start_results_queue  # noqa: E402

start_results_queue()
results = filesystem_async._get_write_results_queue()
for value in ([MetadataIndex("weight")], OSError(28, "No space left on device"), ["a" * 1_000_000]):
    writer = multiprocessing.get_context("fork").Process(target=results.put, args=(value,))
    writer.start()
    writer.join()
    print(repr(results.get_nowait())[:70])
try:
    results.get_nowait()
except queue.Empty:
    print("empty")
print("helpers:", [child.pid for child in psutil.Process().children()])
