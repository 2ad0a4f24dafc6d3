"""What a GPU of each pipeline stage has of a model, counted from its matrices alone: in no time, and nearly exact.

`inventory.take_stock` builds the real modules, which takes seconds for each stage; a search over hundreds of layouts
goes by these numbers, and what it proposes is then built. Biases and sinks of single families are left out.
"""

from __future__ import annotations

from grpo_mega.config.schema import Config, LayoutConfig, LoRAConfig, ModelConfig
from grpo_mega.forecast.planning.counting import (
    Matrix,
    adapter_numbers,
    attention_matrices,
    dense_layers,
    gated,
    layers_of_stages,
    numbers,
)
from grpo_mega.forecast.planning.inventory import StageInventory
from grpo_mega.models.families import layers_of


def shared_out(config: Config, vocab_size: int, gpus: int, scalar: bool = False) -> list[StageInventory]:
    """A GPU of every pipeline stage, of a language model or one with a `scalar` head; see `inventory.Stage`."""
    model, layout, lora = config.model, config.layout, config.lora
    stages, first = [], 0
    for number, layers in enumerate(layers_of_stages(model, layout)):
        piece = layers // layout.vpp  # the first piece of every stage comes before the second of any
        dense = max(0, min(piece, dense_layers(model) - first))
        stages.append(_stage(model, layout, lora, vocab_size, gpus, number, layers, dense, scalar))
        first += piece
    return stages


def _stage(
    model: ModelConfig,
    layout: LayoutConfig,
    lora: LoRAConfig,
    vocab_size: int,
    gpus: int,
    number: int,
    layers: int,
    dense_here: int,
    scalar: bool,
) -> StageInventory:
    tp, last = layout.tp, number == layout.pp - 1
    moe_layers = layers - dense_here if model.moe.experts else 0
    predictors = model.mtp_layers if last and not scalar else 0
    rows = -(-vocab_size // model.vocab_multiple) * model.vocab_multiple
    table = rows * model.hidden / tp
    tables = (number == 0) + (last and not scalar and not (model.tie_embeddings and layout.pp == 1))
    tables += predictors if layout.pp > 1 else 0  # a prediction module needs the embedding, too
    copies = moe_layers + (predictors if model.moe.experts else 0)
    plain = layers - moe_layers + (0 if model.moe.experts else predictors)
    body = copies * _dense(model, tp, experts=True) + plain * _dense(model, tp, experts=False)
    ahead = predictors * (2 * model.hidden**2 / tp + 3 * model.hidden)
    dense = tables * table + body + ahead + last * model.hidden
    sharing = layout.ep * layout.etp
    experts = copies * model.moe.experts * numbers(gated(model.hidden, model.moe.ffn_hidden)) / sharing
    trained_dense, trained_experts = dense, experts
    if lora.rank and not scalar:
        trained_dense, trained_experts = _adapters(model, layout, lora, plain, copies)
        dense, experts = dense + trained_dense, experts + trained_experts
    return StageInventory(
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


def _dense(model: ModelConfig, tp: int, experts: bool) -> float:
    """Numbers of a layer that every token meets, on one of `tp` ranks."""
    moe = model.moe
    inner = moe.shared_ffn_hidden if experts else model.ffn_hidden
    norms = (4 if layers_of(model.family).post_norms else 2) * model.hidden
    if model.attention == "mla":
        norms += (model.mla.q_lora_rank or 0) + model.mla.kv_lora_rank
    elif model.qk_norm:
        norms += 2 * (model.head_dim or model.hidden // model.heads)
    router = model.hidden * moe.experts if experts else 0
    return numbers(attention_matrices(model), tp) + numbers(gated(model.hidden, inner), tp) + norms + router


def _adapters(model: ModelConfig, layout: LayoutConfig, lora: LoRAConfig, dense: int, moe: int) -> tuple[float, float]:
    """Numbers of adapters on a rank with so many layers of each kind: outside of routed experts, and in these."""

    def of(matrices: list[Matrix], target: str) -> float:
        return adapter_numbers(matrices, lora.rank, layout.tp) if target in lora.targets else 0.0

    outside = (dense + moe) * of(attention_matrices(model), "attention")
    outside += dense * of(gated(model.hidden, model.ffn_hidden), "mlp")
    outside += moe * of(gated(model.hidden, model.moe.shared_ffn_hidden), "mlp")
    routed = adapter_numbers(gated(model.hidden, model.moe.ffn_hidden), lora.rank) if "experts" in lora.targets else 0
    return outside, moe * model.moe.experts * routed / (layout.ep * layout.etp)
