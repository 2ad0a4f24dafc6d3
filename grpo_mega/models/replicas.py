"""Gathers parameters and gradients that Megatron's distributed optimizer has sharded over the replicas.

After a backward pass a replica has only its own shard of every reduced gradient. After an update with overlapped
gathering it has its own shard of the new parameters; the next forward pass gathers the others, bucket by bucket, each
when the first module that needs it is called. Until then the other shards have their values from before the update.
"""

from __future__ import annotations

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel


def count_padding(chunk: DistributedDataParallel) -> None:
    """Repairs checkpoints of a distributed optimizer with several buckets (megatron-core 0.16.1).

    Megatron gathers the optimizer's state without the padding at the end of each bucket, then reads every parameter at
    its offset with padding. Counting the padding as content makes both agree.
    """
    for buffer in chunk.buffers + chunk.expert_parallel_buffers:
        buffer.numel_unpadded = buffer.numel
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()


def gather_parameters(model: list[DistributedDataParallel]) -> None:
    """Gathers now the parameters that the next forward pass would gather; does nothing if none are left."""
    for chunk in model:
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups if chunk.use_forward_hook else []:
            group.finish_param_sync(skip_next_bucket_dispatch=True)


def gather_gradients(model: list[DistributedDataParallel]) -> None:
    """Gathers the reduced gradients of the last backward pass, for comparisons; an update reads only its own shard."""
    for chunk in model:
        sharded = chunk.ddp_config.use_distributed_optimizer
        for buffer in chunk.buffers + chunk.expert_parallel_buffers if sharded else []:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                parts = list(bucket.grad_data.chunk(group.size()))
                dist.all_gather(parts, parts[group.rank()].clone(), group=group)
