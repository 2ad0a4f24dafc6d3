"""Floating-point operations that an architecture needs for a batch: matrix products and attention.

Each sequence counts as if it were alone, so the layout of a batch changes nothing, and what is computed twice to save
memory counts once (Model FLOPs, PaLM, arXiv 2204.02311, appendix B). A multiplication with its addition counts as two.
"""

from __future__ import annotations

from collections.abc import Sequence

from grpo_mega.config.schema import ModelConfig


def learning_flops(
    model: ModelConfig, vocab_size: int, lengths: Sequence[int], scored: int, adapters: bool = False
) -> float:
    """Operations of a forward and a backward pass.

    Args:
        model: The architecture.
        vocab_size: Outputs of the head; 1 for a scalar head.
        lengths: Tokens of each sequence.
        scored: Tokens that the head scores.
        adapters: Whether low-rank adapters learn and nothing else, whose own operations are left out.

    A backward pass has a product for the gradient of the input and one for that of the weight, for each of the forward
    pass; adapters leave out the latter. Other frozen weights count as if they were trained.
    """
    weights = sum(lengths) * layer_weights(model) + scored * model.hidden * vocab_size * (1 + model.mtp_layers)
    passes = 2 if adapters else 3
    # Attention has no weights, so adapters leave out none of its products.
    return passes * 2.0 * weights + 3 * attention_flops(model, lengths)


def layer_weights(model: ModelConfig) -> int:
    """Number of matrix weights that a token is multiplied with in all layers, with only the experts it is sent to.

    A prediction module counts as a layer like the last one, with a product of [2 hidden, hidden] before it.
    """
    moe, sparse = model.moe, 0
    # Three matrices: the gate, its factor, and the projection back.
    dense = 3 * model.hidden * model.ffn_hidden
    if moe.experts:
        experts = 3 * model.hidden * (moe.top_k * moe.ffn_hidden + moe.shared_ffn_hidden)
        sparse = experts + model.hidden * moe.experts
    of_layers = [sparse if moe.experts and layer >= moe.first_dense else dense for layer in range(model.layers)]
    ahead = model.mtp_layers * (_attention_weights(model) + of_layers[-1] + 2 * model.hidden**2)
    return model.layers * _attention_weights(model) + sum(of_layers) + ahead


def _attention_weights(model: ModelConfig) -> int:
    """Number of weights of a layer's projections for attention."""
    hidden, heads = model.hidden, model.heads
    if model.attention != "mla":
        width = model.head_dim or hidden // heads
        # Queries and output have all heads, keys and values those of their groups.
        return hidden * width * (2 * heads + 2 * model.kv_heads)
    mla = model.mla
    query = heads * (mla.qk_head_dim + mla.qk_rope_dim)
    down = mla.kv_lora_rank + mla.qk_rope_dim
    up = mla.kv_lora_rank * heads * (mla.qk_head_dim + mla.v_head_dim)
    queries = hidden * query if mla.q_lora_rank is None else mla.q_lora_rank * (hidden + query)
    return queries + hidden * down + up + hidden * heads * mla.v_head_dim


def attention_flops(model: ModelConfig, lengths: Sequence[int]) -> float:
    """Operations of attention in a forward pass: scores and weighted sums of values, for all pairs of tokens."""
    width = model.head_dim or model.hidden // model.heads
    channels = 2 * width
    if model.attention == "mla":
        channels = model.mla.qk_head_dim + model.mla.qk_rope_dim + model.mla.v_head_dim
    # Number of tokens that a token sees in each layer; None for all before it.
    every = model.full_every
    of_layers = [None if every and layer % every == 0 else model.window for layer in range(1, model.layers + 1)]
    of_layers += of_layers[-1:] * model.mtp_layers
    pairs = {window: sum(_pairs(length, window) for length in lengths) for window in {*of_layers}}
    return 2.0 * model.heads * channels * sum(pairs[window] for window in of_layers)


def _pairs(length: int, window: int | None) -> int:
    """Number of pairs of a token and one that it sees, itself included."""
    seen = length if window is None else min(window, length)
    return seen * (seen + 1) // 2 + (length - seen) * seen
