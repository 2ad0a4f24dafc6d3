"""What one rank of every pipeline stage holds, counted by building it: Megatron's real modules, on the meta device.

Tensors there have shapes and take no memory, and the process group only says that there are other ranks, so one process
builds its part of 671 billion parameters on 512 GPUs in a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace

import torch.distributed as dist
from megatron.core import parallel_state

from grpo_mega import platform
from grpo_mega.config.schema import LayoutConfig, LoRAConfig, ModelConfig
from grpo_mega.models.adapters import is_adapter
from grpo_mega.models.body import build_model
from grpo_mega.models.chunks import ModelChunks
from grpo_mega.models.parts import freeze, frozen_parts, part_of
from grpo_mega.models.scalar import body_of
from grpo_mega.models.shards import shards
from grpo_mega.models.topology import make_groups


@dataclass(frozen=True)
class StageInventory:
    """A rank of one pipeline stage.

    Attributes:
        layers: Layers of the model.
        moe_layers: How many of these have experts.
        predictors: Multi-token prediction modules.
        dense: Parameters that every token meets.
        experts: Parameters of routed experts.
        replicas: Ranks that hold the same `dense`, data and context parallel ones.
        expert_replicas: Ranks that hold the same `experts`.
        trained_dense: Those of `dense` that are trained.
        trained_experts: Those of `experts` that are trained.
        whole: {tensor of the whole model that this rank holds a part of: its elements}.
    """

    layers: int
    moe_layers: int
    predictors: int
    dense: int
    experts: int
    replicas: int
    expert_replicas: int
    trained_dense: int
    trained_experts: int
    whole: dict[str, int] = field(repr=False)


@dataclass(frozen=True)
class Role:
    """A model that lies on the GPUs while training.

    Attributes:
        name: What it is called, "policy" or "critic".
        trained: Whether it has gradients and an optimizer, not weights alone.
        saved: Whether checkpoints hold it.
        stages: The first rank of every pipeline stage.
        model: Its architecture, where that is not the policy's.
    """

    name: str
    trained: bool
    saved: bool
    stages: list[StageInventory] = field(repr=False)
    model: ModelConfig | None = None


_stocks: dict[str, list[StageInventory]] = {}


def take_stock(
    model: ModelConfig,
    layout: LayoutConfig,
    vocab_size: int,
    world_size: int,
    scalar: bool = False,
    frozen: Sequence[str] = (),
    lora: LoRAConfig | None = None,
) -> list[StageInventory]:
    """The first rank of every pipeline stage, of a language model or of a model with a `scalar` head.

    `frozen` parts of the model, fields of `PartsConfig`, are not trained; with `lora`, unless its rank is 0, it has
    adapters and nothing else is trained. Call `platform.start_planning` first, and `check_layout`.
    """
    built = body_of(model) if scalar else model
    adapters = lora if lora is not None and lora.rank else None
    kept = frozen_parts(frozen, adapters)
    alike = replace(built, context=1), replace(layout, micro_batch_tokens=1, recompute="full", attention="auto")
    key = repr((*alike, vocab_size, world_size, scalar, sorted(kept), adapters))
    if key not in _stocks:  # runs that differ in their engines or in activations are planned one after the other
        _stocks[key] = [
            _stage(built, layout, vocab_size, world_size, number, scalar, kept, adapters) for number in range(layout.pp)
        ]
    return _stocks[key]


def total(stages: list[StageInventory]) -> tuple[int, int]:
    """Parameters of the model, balancing biases included, and of its multi-token prediction modules; no adapters."""
    whole = {key: size for key, size in _whole(stages).items() if not is_adapter(key)}
    ahead = sum(size for key, size in whole.items() if key.startswith("mtp."))
    return sum(whole.values()) - ahead, ahead


def elements(stages: list[StageInventory]) -> int:
    """Numbers in all tensors of the model, adapters included."""
    return sum(_whole(stages).values())


def trained_elements(stages: list[StageInventory], frozen: Set[str], tied: bool) -> int:
    """Numbers in the tensors of a model outside of its frozen parts."""
    return sum(size for key, size in _whole(stages).items() if part_of(key, tied) not in frozen)


def adapters_alone(stage: StageInventory) -> StageInventory:
    """The adapters of a stage, which are all that it trains."""
    whole = {key: size for key, size in stage.whole.items() if is_adapter(key)}
    return replace(stage, dense=stage.trained_dense, experts=stage.trained_experts, whole=whole)


def _whole(stages: list[StageInventory]) -> dict[str, int]:
    return {key: size for stage in stages for key, size in stage.whole.items()}


def _stage(
    model: ModelConfig,
    layout: LayoutConfig,
    vocab_size: int,
    world_size: int,
    number: int,
    scalar: bool,
    frozen: Set[str],
    lora: LoRAConfig | None,
) -> StageInventory:
    here = platform.pretend_rank(number * world_size // layout.pp, world_size)
    make_groups(layout, seed=0, pretended=True)
    try:
        built = build_model(model, layout, vocab_size, here, scalar, lora)
        freeze(built, lambda name: part_of(name, model.tie_embeddings) in frozen)
        return _counted(built, layout)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _counted(gpt: ModelChunks, layout: LayoutConfig) -> StageInventory:
    layers = [layer for chunk in gpt for layer in chunk.decoder.layers]
    named = dict(gpt.named_parameters())
    sizes = {name: p.numel() * _copies(name, layout) for name, p in named.items()}
    trained = {name: size for name, size in sizes.items() if named[name].requires_grad}
    experts, trained_experts = (
        sum(size for name, size in counted.items() if ".experts." in name) for counted in (sizes, trained)
    )
    return StageInventory(
        layers=len(layers),
        moe_layers=sum(hasattr(layer.mlp, "router") for layer in layers),
        predictors=sum(len(chunk.mtp.layers) for chunk in gpt if getattr(chunk, "mtp", None) is not None),
        dense=sum(sizes.values()) - experts,
        experts=experts,
        replicas=parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        expert_replicas=parallel_state.get_expert_data_parallel_world_size(),
        trained_dense=sum(trained.values()) - trained_experts,
        trained_experts=trained_experts,
        whole={shard.key: math.prod(shard.global_shape) for shard in shards(gpt)},
    )


def _copies(name: str, layout: LayoutConfig) -> int:
    """How many times a GPU holds what is built here.

    Transformer Engine's layers keep the small projections of latent attention whole on every tensor parallel rank;
    Megatron's own layers, which are used without a GPU, split them.
    """
    down = ("linear_q_down_proj.weight", "linear_kv_down_proj.weight")
    return layout.tp if name.replace(".adapter.b", ".weight").endswith(down) else 1
