"""A program without a guard around its main part: whatever imports it as a main module runs it once more."""

import multiprocessing
from pathlib import Path

from torch.distributed.checkpoint.metadata import MetadataIndex

from grpo_mega import platform

platform.start()

from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402

from grpo_mega.checkpoint.writers import start_results_queue  # noqa: E402

start_results_queue()
queue = filesystem_async._get_write_results_queue()
for value in ([MetadataIndex("weight")], OSError(28, "No space left on device")):
    writer = multiprocessing.get_context("fork").Process(target=queue.put, args=(value,))
    writer.start()
    writer.join()
    print(repr(queue.get_nowait()))
(helper,) = multiprocessing.active_children()
print("libraries of torch in the helper:", Path(f"/proc/{helper.pid}/maps").read_text().count("libtorch"))
