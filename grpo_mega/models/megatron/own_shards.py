"""State that Megatron's distributed optimizer shards over the replicas: gathered on demand, kept apart in checkpoints.

After a backward pass a replica has only its own shard of every reduced gradient. After an update with overlapped
gathering it has its own shard of the new parameters; the next forward pass gathers the others, bucket by bucket, each
when the first module that needs it is called. Until then the other shards have their values from before the update.

Before a checkpoint is written, Megatron gathers the state of all replicas on each of them, in main memory, and copies
what a rank writes once more; to read it, each replica has room for all of it. Here every rank writes and reads its own
part. A rank's part of a parameter is a range of its numbers in their order; the range is cut into a few boxes of rows,
and these are the shards.

The content of a checkpoint is the same: the same tensors under the same keys, only cut differently. Megatron's way and
this one read each other's checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from grpo_mega.models.transfer import float_copies

NAMES = ("param", "exp_avg", "exp_avg_sq")
"""Parts of a parameter's state in a checkpoint: the fp32 weight and the moments."""
Box = tuple[tuple[int, int], ...]
"""(first, one past the last) index along every axis."""


def count_padding(chunk: DistributedDataParallel) -> None:
    """Repairs checkpoints of a distributed optimizer with several buckets (megatron-core 0.16.1).

    Megatron gathers the optimizer's state without the padding at the end of each bucket, then reads every parameter at
    its offset with padding (docs/parity.md, defect 6). Counting the padding as content makes both agree.
    """
    for buffer in chunk.buffers + chunk.expert_parallel_buffers:
        buffer.numel_unpadded = buffer.numel
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()


def gather_parameters(model: list[DistributedDataParallel]) -> None:
    """Gathers now the parameters that the next forward pass would gather; does nothing if none are left."""
    for chunk in model:
        # Megatron starts the gather of a group that is not under way yet before it waits for it, so none is dispatched
        # ahead.
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups if chunk.use_forward_hook else []:
            group.finish_param_sync(skip_next_bucket_dispatch=True)


def gather_gradients(model: list[DistributedDataParallel]) -> None:
    """Gathers the reduced gradients of the last backward pass, for comparisons; an update reads only its own shard."""
    for chunk in model:
        sharded = chunk.ddp_config.use_distributed_optimizer
        for buffer in chunk.buffers + chunk.expert_parallel_buffers if sharded else []:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                # Cloned, because the buffer that is sent is also a part of the one that receives.
                parts = list(bucket.grad_data.chunk(group.size()))
                dist.all_gather(parts, parts[group.rank()].clone(), group=group)


class OwnShards(DistributedOptimizer):
    """Megatron's distributed optimizer, whose ranks keep their shards of the state apart in a checkpoint."""

    def sharded_param_state_fully_reshardable(
        self, model_sharded_state_dict: dict[str, Any], is_loading: bool = False, metadata: dict | None = None
    ) -> dict[int, dict[str, list[ShardedTensor]]]:
        """This rank's {number of a parameter: {part of its state: its shards, in order}}.

        Shards of a state that is saved are copies in main memory; those of a state to load have no data yet.

        Raises:
            ValueError: A parameter is stored in another order than it has in memory.
        """
        model_state, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
        described = {id(item.data): item for item in nested_values(model_state)}
        state: dict[int, dict[str, list[ShardedTensor]]] = {}
        for number, (parameter, start, end) in enumerate(self._own_ranges()):
            # The model's state and the optimizer's ranges refer to the same parameter objects.
            item = described[id(parameter)]
            shards = shards_of_range(item, start, end, self.distributed_optimizer_instance_id)
            state[number] = {
                name: [replace(shard, key=f"optimizer.state.{name}.{shard.key}") for shard in shards] for name in NAMES
            }
        if not is_loading:
            # A state that is on the host is copied as well: the processes that write must not get pinned memory.
            copies = iter(float_copies(self._values(state)))
            for shard in (shard for of_parameter in state.values() for name in NAMES for shard in of_parameter[name]):
                shard.data = next(copies).view(shard.local_shape)
        return state

    def _values(self, state: dict[int, dict[str, list[ShardedTensor]]]) -> Iterator[torch.Tensor]:
        """The flat values of each shard of a state, on the device that holds them, one parameter after the other."""
        for number, (parameter, _, _) in enumerate(self._own_ranges()):
            values = self._get_main_param_and_optimizer_states(parameter)
            for name in NAMES:
                sizes = [prod(shard.local_shape) for shard in state[number][name]]
                yield from values[name].detach().flatten().split(sizes)

    @torch.no_grad()
    def load_parameter_state_from_fully_reshardable(self, state_dict: dict) -> None:
        """Loads a state in the format of the method above, with tensors in place of shards."""
        for number, (parameter, _, _) in enumerate(self._own_ranges()):
            parts = {name: torch.cat([part.flatten() for part in state_dict[number][name]]) for name in NAMES}
            self._set_main_param_and_optimizer_states(parameter, parts)

    def _own_ranges(self) -> Iterator[tuple[torch.nn.Parameter, int, int]]:
        """Yields each parameter whose state is partly on this rank, with the first index here and one past the last."""
        for buffer in self.gbuf_ranges:
            for buckets in buffer.values():
                for bucket in buckets:
                    for parameter, where in bucket["param_map"].items():
                        yield parameter, where["param"].start, where["param"].end


def keep_shards_apart(optimizer: Any) -> None:
    """Makes the distributed optimizers among Megatron's `OwnShards`."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        # Megatron's factory builds the optimizer with dozens of arguments and offers no way to name another class.
        if type(part) is DistributedOptimizer:
            part.__class__ = OwnShards


def shards_of_range(
    item: ShardedTensor | ShardedTensorFactory, start: int, end: int, instance: int = 0
) -> list[ShardedTensor]:
    """The shards, without data, that make up the numbers `start` to `end` of a parameter, in order.

    Args:
        item: The parameter's entry in the model's state: a tensor or a factory of several, such as gate and projection.
        start: The first number.
        end: One past the last.
        instance: Number of the optimizer among those with the same state.

    Raises:
        ValueError: A factory makes tensors that order the numbers differently from the parameter.
    """
    shards = []
    for whole, first in _tensors(item):
        for box in boxes(whole.local_shape, start - first, end - first):
            leading = whole.prepend_axis_num
            offset = (o + low for o, (low, _) in zip(whole.global_offset[leading:], box, strict=True))
            shard = replace(
                whole,
                data=None,
                dtype=torch.float32,
                local_shape=(*(1,) * leading, *(high - low for low, high in box)),
                global_offset=(*whole.global_offset[:leading], *offset),
                # Boxes form no regular grid, and of a grid Megatron forgets the axes that it prepends.
                axis_fragmentations=None,
                prepend_axis_num=0,
                # No other replica has these numbers, so the shard must not count as a copy of one.
                replica_id=(*whole.replica_id[:2], instance),
            )
            shards.append(shard)
    return shards


def boxes(shape: tuple[int, ...], start: int, end: int) -> list[Box]:
    """The boxes that make up the numbers `start` to `end` of a tensor, in order.

    They are at most 2 x axes - 1: the end of a row, whole rows, the beginning of one, and the same within a row. The
    range is cut off where the tensor begins and ends.
    """
    start, end = max(start, 0), min(end, prod(shape))
    if start >= end:
        return []
    size = prod(shape[1:])
    # Rows `first` up to `last` are in the range as a whole.
    first, last = -(-start // size), end // size
    # The range begins and ends within the same row.
    if first > last:
        return [((last, last + 1), *box) for box in boxes(shape[1:], start - last * size, end - last * size)]
    ahead = [((first - 1, first), *box) for box in boxes(shape[1:], size - (first * size - start), size)]
    rows = [((first, last), *((0, length) for length in shape[1:]))] if first < last else []
    behind = [((last, last + 1), *box) for box in boxes(shape[1:], 0, end - last * size)]
    return [*ahead, *rows, *behind]


def _tensors(item: ShardedTensor | ShardedTensorFactory) -> Iterator[tuple[ShardedTensor, int]]:
    """The tensors of a parameter, in order, each with the index of its first number in the parameter."""
    if isinstance(item, ShardedTensor):
        yield item, 0
        return
    # Tensors without memory know where they lie in the parameter.
    made = replace(item, data=torch.empty(item.data.shape, device="meta")).build()
    for tensor in sorted(nested_values(made), key=lambda tensor: tensor.data.storage_offset()):
        if not tensor.data.is_contiguous():
            raise ValueError(f"{item.key} is stored in another order than it has in memory: a rank cannot write a part")
        yield tensor, tensor.data.storage_offset()
