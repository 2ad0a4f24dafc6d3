"""What one rank of every pipeline stage holds: built, exactly, or counted from matrices, fast and nearly exactly.

`take_stock` builds Megatron's real modules on the meta device, where tensors have shapes and take no memory. Process
groups are pretended, so one process builds its part of 671 billion parameters on 512 GPUs in a second.

A second for each stage is too much for a search over hundreds of layouts, and a job that chooses its own layout cannot
pretend other process groups. Both use `counted` stages, which take microseconds and leave out the biases and sinks that
some families have. So the same numbers are computed in two ways, on purpose: test_plan.py checks one against the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace

import torch.distributed as dist
from megatron.core import parallel_state

from grpo_mega import platform
from grpo_mega.config.schema import LayoutConfig, LoRAConfig, ModelConfig
from grpo_mega.forecast.planning.counting import (
    adapter_numbers,
    attention_matrices,
    dense_layers,
    gated,
    layer_matrices,
    layers_of_stages,
    numbers,
)
from grpo_mega.models.adapters import is_adapter
from grpo_mega.models.body import build_model, head_channels
from grpo_mega.models.chunks import ModelChunks
from grpo_mega.models.families import layers_of
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
        replicas: Data and context parallel ranks, which hold the same `dense`.
        expert_replicas: Ranks that hold the same `experts`.
        trained_dense: Those of `dense` that are trained.
        trained_experts: Those of `experts` that are trained.
        whole: {tensor of which this rank holds a part: elements of the whole tensor}; empty if counted.
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
    """A model that is on the GPUs during training.

    Attributes:
        name: Such as "policy" or "critic".
        trained: Whether it has gradients and an optimizer besides weights.
        saved: Whether checkpoints hold it.
        stages: The first rank of every pipeline stage.
        model: Its architecture, if that is not the policy's.
    """

    name: str
    trained: bool
    saved: bool
    stages: list[StageInventory] = field(repr=False)
    model: ModelConfig | None = None


# Inventories of this process by what they depend on: building one takes seconds, and several plans ask for the same.
_stocks: dict[str, list[StageInventory]] = {}


def take_stock(
    model: ModelConfig,
    layout: LayoutConfig,
    vocab_size: int,
    gpus: int,
    *,
    scalar: bool = False,
    frozen: Sequence[str] = (),
    lora: LoRAConfig | None = None,
    counted: bool = False,
) -> list[StageInventory]:
    """The first rank of every pipeline stage. Call `check_layout` first and, unless `counted`, `start_planning`.

    Args:
        model: The architecture.
        layout: How it is split.
        vocab_size: Tokens that it scores.
        gpus: GPUs of the run.
        scalar: Whether it has a scalar head instead of an output layer.
        frozen: Parts that are not trained, fields of `PartsConfig`; counted stages take them for trained.
        lora: Adapters, unless its rank is 0; then nothing else is trained.
        counted: Whether stages are counted from matrices, not built.
    """
    adapters = lora if lora is not None and lora.rank else None
    if counted:
        return _count(model, layout, vocab_size, gpus, scalar, adapters)
    model = body_of(model) if scalar else model
    kept = frozen_parts(frozen, adapters)
    # Runs that differ only in engines or activations are planned one after the other, and hold the same.
    alike = replace(model, context=1), replace(layout, micro_batch_tokens=1, recompute="full", attention="auto")
    key = repr((*alike, vocab_size, gpus, scalar, sorted(kept), adapters))
    if key not in _stocks:
        stages = []
        for number in range(layout.pp):
            rank = platform.pretend_rank(number * gpus // layout.pp, gpus)
            make_groups(layout, seed=0, pretended=True)
            try:
                built = build_model(model, layout, vocab_size, rank, scalar, adapters)
                freeze(built, lambda name: part_of(name, model.tie_embeddings) in kept)
                stages.append(_stage_of(built, layout))
            finally:
                # A process can pretend one rank at a time, so the groups of this one must go, also after an error.
                parallel_state.destroy_model_parallel()
                dist.destroy_process_group()
        _stocks[key] = stages
    return _stocks[key]


def total(stages: list[StageInventory]) -> tuple[int, int]:
    """Parameters of the model, with balancing biases, and of its multi-token prediction modules; without adapters."""
    whole = {key: size for key, size in _whole(stages).items() if not is_adapter(key)}
    predictors = sum(size for key, size in whole.items() if key.startswith("mtp."))
    return sum(whole.values()) - predictors, predictors


def elements(stages: list[StageInventory]) -> int:
    """Elements of all tensors of the model, with adapters."""
    return sum(_whole(stages).values())


def trained_elements(stages: list[StageInventory], frozen: Set[str], tied: bool) -> int:
    """Elements of the tensors of a model outside its frozen parts."""
    return sum(size for key, size in _whole(stages).items() if part_of(key, tied) not in frozen)


def adapters_alone(stage: StageInventory) -> StageInventory:
    """The adapters of a stage, which are all that it trains."""
    whole = {key: size for key, size in stage.whole.items() if is_adapter(key)}
    return replace(stage, dense=stage.trained_dense, experts=stage.trained_experts, whole=whole)


def _whole(stages: list[StageInventory]) -> dict[str, int]:
    return {key: size for stage in stages for key, size in stage.whole.items()}


def _stage_of(gpt: ModelChunks, layout: LayoutConfig) -> StageInventory:
    """The inventory of a rank's modules."""
    layers = [layer for chunk in gpt for layer in chunk.decoder.layers]
    named = dict(gpt.named_parameters())
    # Transformer Engine keeps the down-projections of latent attention whole on every tensor parallel rank; Megatron's
    # own layers, which are built here without a GPU, split them.
    down = ("linear_q_down_proj.weight", "linear_kv_down_proj.weight")
    sizes = {
        name: p.numel() * (layout.tp if name.replace(".adapter.b", ".weight").endswith(down) else 1)
        for name, p in named.items()
    }
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


def _count(
    model: ModelConfig, layout: LayoutConfig, vocab_size: int, gpus: int, scalar: bool, lora: LoRAConfig | None
) -> list[StageInventory]:
    """The same from sizes of matrices alone."""
    tp, moe, sharing = layout.tp, model.moe, layout.ep * layout.etp
    table = -(-vocab_size // model.vocab_multiple) * model.vocab_multiple * model.hidden / tp
    per_expert = numbers(gated(model.hidden, moe.ffn_hidden))
    stages: list[StageInventory] = []
    # Layers before the stage's first piece. With interleaving, the first pieces of all stages come before the second
    # piece of any, so dense layers, which come first in a model, are taken to be in first pieces alone.
    first = 0
    for number, layers in enumerate(layers_of_stages(model, layout)):
        last = number == layout.pp - 1
        piece = layers // layout.vpp
        moe_layers = layers - max(0, min(piece, dense_layers(model) - first)) if moe.experts else 0
        first += piece
        predictors = model.mtp_layers if last and not scalar else 0
        tables = (number == 0) + (last and not scalar and not (model.tie_embeddings and layout.pp == 1))
        # Prediction modules read the embedding, so their stage has a copy unless it is the first.
        tables += predictors if layout.pp > 1 else 0
        copies = moe_layers + (predictors if moe.experts else 0)
        plain = layers - moe_layers + (0 if moe.experts else predictors)
        body = copies * _layer_numbers(model, tp, experts=True) + plain * _layer_numbers(model, tp, experts=False)
        ahead = predictors * (2 * model.hidden**2 / tp + 3 * model.hidden)
        dense = tables * table + body + ahead + last * model.hidden
        experts = copies * moe.experts * per_expert / sharing
        trained_dense, trained_experts = dense, experts
        if lora and not scalar:
            trained_dense, trained_experts = _adapters(model, layout, lora, plain, copies)
            dense, experts = dense + trained_dense, experts + trained_experts
        stages.append(
            StageInventory(
                layers=layers,
                moe_layers=moe_layers,
                predictors=predictors,
                dense=round(dense),
                experts=round(experts),
                replicas=gpus // layout.pp // tp,
                expert_replicas=max(1, gpus // layout.pp // sharing),
                trained_dense=round(trained_dense),
                trained_experts=round(trained_experts),
                whole={},
            )
        )
    return stages


def _layer_numbers(model: ModelConfig, tp: int, experts: bool) -> float:
    """Elements of a layer that every token meets, on one of `tp` ranks."""
    moe = model.moe
    attention, mlp, _ = layer_matrices(model, experts)
    norms = (4 if layers_of(model.family).post_norms else 2) * model.hidden
    if model.attention == "mla":
        norms += (model.mla.q_lora_rank or 0) + model.mla.kv_lora_rank
    elif model.qk_norm:
        norms += 2 * head_channels(model)
    router = model.hidden * moe.experts if experts else 0
    return numbers(attention, tp) + numbers(mlp, tp) + norms + router


def _adapters(model: ModelConfig, layout: LayoutConfig, lora: LoRAConfig, dense: int, moe: int) -> tuple[float, float]:
    """Elements of adapters on a rank with so many layers of each kind: outside routed experts, and in these."""
    per_target = {
        "attention": adapter_numbers(attention_matrices(model), lora.rank, layout.tp),
        "dense mlp": adapter_numbers(gated(model.hidden, model.ffn_hidden), lora.rank, layout.tp),
        "shared mlp": adapter_numbers(gated(model.hidden, model.moe.shared_ffn_hidden), lora.rank, layout.tp),
        "experts": adapter_numbers(gated(model.hidden, model.moe.ffn_hidden), lora.rank),
    }
    has = {name: size if name.split()[-1] in lora.targets else 0.0 for name, size in per_target.items()}
    outside = (dense + moe) * has["attention"] + dense * has["dense mlp"] + moe * has["shared mlp"]
    return outside, moe * model.moe.experts * has["experts"] / (layout.ep * layout.etp)
