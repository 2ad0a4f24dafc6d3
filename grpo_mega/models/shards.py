"""Every parameter under its checkpoint key, whole, whatever the layout: initialisation and comparison rest on this.

A shard knows its key and which slice of the whole tensor it is, so two layouts can be filled with, and compared by,
the same whole tensors.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    is_main_replica,
)
from megatron.core.transformer.module import MegatronModule

Box = tuple[tuple[int, int], ...]
"""First and last (excluded) index along every axis."""


def shards(
    module: MegatronModule, of: Callable[[torch.Tensor], torch.Tensor | None] = lambda p: p.data
) -> list[ShardedTensor]:
    """This rank's shards, each holding `of(parameter)`: its data, its gradient; None leaves a parameter out."""
    state = module.sharded_state_dict()

    def with_data(item: object) -> object:
        if not isinstance(item, (ShardedTensor, ShardedTensorFactory)):
            return None
        data = of(item.data)
        if data is None:
            return None
        kind = {} if isinstance(item, ShardedTensorFactory) else {"dtype": data.dtype}
        return dataclasses.replace(item, data=data, **kind)

    dict_list_map_inplace(with_data, state)
    apply_factories(state)
    return [item for item in nested_values(state) if isinstance(item, ShardedTensor)]


def place(shard: ShardedTensor) -> tuple[int | slice, ...]:
    """Where a shard lies in its whole tensor."""
    leading = shard.prepend_axis_num
    offset = shard.global_offset
    return (*offset[:leading], *(slice(o, o + n) for o, n in zip(offset[leading:], shard.data.shape, strict=True)))


_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Norms that Transformer Engine fuses with the layer behind; without it Megatron has the same keys, for some models."""


def named_box(shard: ShardedTensor) -> tuple[str, Box]:
    """The name of the tensor that a shard is part of, one for each layer and each expert, and where it lies there.

    Keys themselves depend on the model and on Megatron's layers: they hold alike layers as one tensor, and the experts
    of a layer.
    """
    leading, name = [*shard.global_offset[: shard.prepend_axis_num]], shard.key
    if re.search(r"\blayers\.(?!\d)", name):
        name = name.replace("layers.", f"layers.{leading.pop(0)}.", 1)
    if leading:
        name = name.replace(".experts.experts.", f".experts.{leading.pop(0)}.")
    for fused, plain in _FUSED_NORMS.items():
        name = name.replace(fused, plain)
    return name, tuple((s.start, s.stop) for s in place(shard) if isinstance(s, slice))


@torch.no_grad()
def initialize(module: MegatronModule, seed: int, std: float, layers: int) -> None:
    """Fills the weights from a normal distribution that depends on seed and key alone, so not on the layout.

    Projections back into the residual stream get std / sqrt(2 * layers) (GPT-2), norms 1, balancing biases 0.
    """
    for shard in shards(module, lambda p: p.data):
        if not shard.data.is_floating_point() or "expert_bias" in shard.key:
            shard.data.zero_()
        elif "norm" in shard.key:
            shard.data.fill_(1.0)
        else:
            residual = "linear_proj" in shard.key or "linear_fc2" in shard.key
            generator = torch.Generator().manual_seed(seed * 2**32 + zlib.crc32(shard.key.encode()))
            whole = torch.randn(shard.global_shape, generator=generator)
            scale = std / (2 * layers) ** 0.5 if residual else std
            shard.data.copy_(whole[place(shard)] * scale)


def count_parameters(module: MegatronModule) -> int:
    """Parameters of the whole model, each counted once whatever the layout; every rank must call it."""
    parameters = {id(p) for p in module.parameters()}
    mine = shards(module, lambda p: p.data if id(p) in parameters else None)
    counts: list = [None] * dist.get_world_size()
    dist.all_gather_object(counts, sum(s.data.numel() for s in mine if is_main_replica(s.replica_id)))
    return sum(counts)


def gather_whole(
    module: MegatronModule, of: Callable[[torch.Tensor], torch.Tensor | None] = lambda p: p.data
) -> dict[str, torch.Tensor]:
    """Whole floating-point tensors by key, on every rank; what no rank holds is NaN. For comparing small models."""
    mine = [
        (s.key, tuple(s.global_shape), place(s), s.data.detach().cpu().clone())
        for s in shards(module, of)
        if is_main_replica(s.replica_id) and s.data.is_floating_point()
    ]
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    whole: dict[str, torch.Tensor] = {}
    for key, shape, where, data in (item for rank in everyone for item in rank):
        if key not in whole:
            whole[key] = torch.full(shape, float("nan"), dtype=data.dtype)
        whole[key][where] = data
    return whole
