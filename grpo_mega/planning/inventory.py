"""What one rank of every pipeline stage holds, found by building it: Megatron's real modules, on the meta device.

Tensors there have shapes and take no memory, and the process group only says that there are other ranks, so one process
builds its part of 671 billion parameters on 512 GPUs in a second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch.distributed as dist
from megatron.core import parallel_state

from grpo_mega import platform
from grpo_mega.config.schema import LayoutConfig, ModelConfig
from grpo_mega.models.body import build_model
from grpo_mega.models.chunks import ModelChunks
from grpo_mega.models.scalar import body_of
from grpo_mega.models.shards import shards
from grpo_mega.models.topology import make_groups


@dataclass(frozen=True)
class Stage:
    """A rank of one pipeline stage.

    Attributes:
        layers: Layers of the model.
        moe_layers: How many of these have experts.
        predictors: Multi-token prediction modules.
        dense: Parameters that every token meets.
        experts: Parameters of routed experts.
        replicas: Ranks that hold the same `dense`, data and context parallel ones.
        expert_replicas: Ranks that hold the same `experts`.
        whole: Tensor of the whole model that it holds a part of -> its size.
    """

    layers: int
    moe_layers: int
    predictors: int
    dense: int
    experts: int
    replicas: int
    expert_replicas: int
    whole: dict[str, int] = field(repr=False)


@dataclass(frozen=True)
class Role:
    """A model that lies on the GPUs while training.

    Attributes:
        name: What it is called, "policy" or "critic".
        trained: Whether it has gradients and an optimizer, not weights alone.
        saved: Whether checkpoints hold it.
        stages: The first rank of every pipeline stage.
    """

    name: str
    trained: bool
    saved: bool
    stages: list[Stage] = field(repr=False)


def take_stock(
    model: ModelConfig, layout: LayoutConfig, vocab_size: int, world_size: int, scalar: bool = False
) -> list[Stage]:
    """The first rank of every pipeline stage, of a language model or of a model with a `scalar` head.

    Call `platform.start_planning` first, and `check_layout`.
    """
    built = body_of(model) if scalar else model
    return [_stage(built, layout, vocab_size, world_size, number, scalar) for number in range(layout.pp)]


def total(stages: list[Stage]) -> tuple[int, int]:
    """Parameters of the model, balancing biases included, and of its multi-token prediction modules."""
    whole = {key: size for stage in stages for key, size in stage.whole.items()}
    ahead = sum(size for key, size in whole.items() if key.startswith("mtp."))
    return sum(whole.values()) - ahead, ahead


def _stage(
    model: ModelConfig, layout: LayoutConfig, vocab_size: int, world_size: int, number: int, scalar: bool
) -> Stage:
    here = platform.pretend_rank(number * world_size // layout.pp, world_size)
    make_groups(layout, seed=0, pretended=True)
    try:
        return _counted(build_model(model, layout, vocab_size, here, scalar), layout)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _counted(gpt: ModelChunks, layout: LayoutConfig) -> Stage:
    layers = [layer for chunk in gpt for layer in chunk.decoder.layers]
    sizes = {name: p.numel() * _copies(name, layout) for name, p in gpt.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    return Stage(
        layers=len(layers),
        moe_layers=sum(hasattr(layer.mlp, "router") for layer in layers),
        predictors=sum(len(chunk.mtp.layers) for chunk in gpt if getattr(chunk, "mtp", None) is not None),
        dense=sum(sizes.values()) - experts,
        experts=experts,
        replicas=parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        expert_replicas=parallel_state.get_expert_data_parallel_world_size(),
        whole={shard.key: math.prod(shard.global_shape) for shard in shards(gpt)},
    )


def _copies(name: str, layout: LayoutConfig) -> int:
    """How many times a GPU holds what is built here.

    Transformer Engine's layers keep the small projections of latent attention whole on every tensor parallel rank;
    Megatron's own, which take their place without a GPU, split them.
    """
    return layout.tp if name.endswith(("linear_q_down_proj.weight", "linear_kv_down_proj.weight")) else 1
