"""Parameters as shards of whole tensors under their checkpoint keys, for initialisation and comparison in any layout.

A shard has a key and its slice of the whole tensor, so two layouts can be initialised with, and compared by, the same
whole tensors.
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
"""(first, one past the last) index along every axis."""


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
        # A factory has no dtype; the tensors that it makes take that of their data.
        kind = {} if isinstance(item, ShardedTensorFactory) else {"dtype": data.dtype}
        return dataclasses.replace(item, data=data, **kind)

    dict_list_map_inplace(with_data, state)
    apply_factories(state)
    return [item for item in nested_values(state) if isinstance(item, ShardedTensor)]


def index_in_whole(shard: ShardedTensor) -> tuple[int | slice, ...]:
    """The index of a shard in its whole tensor: `whole[index_in_whole(shard)]` is the shard."""
    leading = shard.prepend_axis_num
    offset = shard.global_offset
    return (*offset[:leading], *(slice(o, o + n) for o, n in zip(offset[leading:], shard.data.shape, strict=True)))


_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Norms that Transformer Engine fuses with the next layer: part of their key -> replacement. Without Transformer Engine
some of Megatron's models have the fused keys too."""


def plain_name(name: str) -> str:
    """A checkpoint key, or a name derived from one, without fused norms."""
    for fused, plain in _FUSED_NORMS.items():
        name = name.replace(fused, plain)
    return name


def named_box(shard: ShardedTensor) -> tuple[str, Box]:
    """Name of a shard's whole tensor, one for each layer and expert, and the shard's box in it.

    Checkpoint keys do not suffice, as they depend on the model and on Megatron's layers: one key can stand for a stack
    of equal layers, or for all experts of a layer.
    """
    leading, name = [*shard.global_offset[: shard.prepend_axis_num]], shard.key
    if re.search(r"\blayers\.(?!\d)", name):
        name = name.replace("layers.", f"layers.{leading.pop(0)}.", 1)
    if leading:
        name = name.replace(".experts.experts.", f".experts.{leading.pop(0)}.")
    return plain_name(name), tuple((s.start, s.stop) for s in index_in_whole(shard) if isinstance(s, slice))


@torch.no_grad()
def initialize(module: MegatronModule, seed: int, std: float, layers: int) -> None:
    """Fills the weights with normal noise that depends only on seed and checkpoint key, not on the layout.

    Projections back into the residual stream get std / sqrt(2 * layers) (GPT-2), norms 1 (0 where they
    multiply by 1 + weight), biases 0.
    """
    for shard in shards(module):
        if not shard.data.is_floating_point() or shard.key.endswith("bias"):
            shard.data.zero_()
        elif "norm" in shard.key:
            shard.data.fill_(0.0 if module.config.layernorm_zero_centered_gamma else 1.0)
        else:
            residual = "linear_proj" in shard.key or "linear_fc2" in shard.key
            # The whole tensor is drawn on every rank and then cut, because the numbers must not depend on the layout.
            whole = torch.randn(shard.global_shape, generator=generator_of(shard.key, seed))
            scale = std / (2 * layers) ** 0.5 if residual else std
            shard.data.copy_(whole[index_in_whole(shard)] * scale)


def generator_of(name: str, seed: int) -> torch.Generator:
    """Random generator of a weight, from its name and a 32-bit seed (a CPU generator does not take more bits)."""
    return torch.Generator().manual_seed(zlib.crc32(name.encode(), seed))


def count_parameters(module: MegatronModule, counted: Callable[[str], bool] = lambda _: True) -> int:
    """Number of parameters of the whole model, with balancing biases and prediction modules.

    Each counts once whatever the layout. Every rank must call it. `counted` decides by key which parameters count.
    """
    local = shards(module, lambda p: p.data if p.is_floating_point() else None)
    counts: list = [None] * dist.get_world_size()
    # Several ranks may hold the same shard; only the main one of them counts it.
    mine = (s.data.numel() for s in local if is_main_replica(s.replica_id) and counted(s.key))
    dist.all_gather_object(counts, sum(mine))
    return sum(counts)


def gather_whole(
    module: MegatronModule, of: Callable[[torch.Tensor], torch.Tensor | None] = lambda p: p.data
) -> dict[str, torch.Tensor]:
    """Whole floating-point tensors by key, on every rank; NaN where no rank has a shard. For comparing small models."""
    local = [
        (s.key, tuple(s.global_shape), index_in_whole(s), s.data.detach().cpu().clone())
        for s in shards(module, of)
        if is_main_replica(s.replica_id) and s.data.is_floating_point()
    ]
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, local)
    whole: dict[str, torch.Tensor] = {}
    for key, shape, index, data in (item for of_rank in gathered for item in of_rank):
        if key not in whole:
            whole[key] = torch.full(shape, float("nan"), dtype=data.dtype)
        whole[key][index] = data
    return whole
