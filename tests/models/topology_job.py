"""Joins and leaves a layout several times in one job; prints this rank's number of threads after each time, as JSON."""

import json

import psutil
import torch
import torch.distributed as dist

from grpo_mega import platform

HERE = platform.start()
platform.join_processes(HERE)

from megatron.core import parallel_state  # noqa: E402

from grpo_mega.config.schema import LayoutConfig  # noqa: E402
from grpo_mega.models.topology import join_layout, leave_groups  # noqa: E402

if __name__ == "__main__":
    threads = []
    for _ in range(3):
        topology = join_layout(LayoutConfig(tp=2), seed=0)
        dist.all_reduce(torch.ones(1), group=parallel_state.get_tensor_model_parallel_group())
        cycle: list = [topology.lock_step]
        cycle.append(cycle)  # as Megatron's modules have
        del topology, cycle
        leave_groups()
        threads.append(psutil.Process().num_threads())
    print(json.dumps(threads))
    dist.barrier()
