"""Parameters and operations of a model, counted from its matrices, for the planner's times.

An operation is a multiplication or an addition: a product with a matrix takes two per number and token. Norms, biases
and activations count as bytes moved (`memory.layer_bytes`), not as operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_mega.config.schema import LayoutConfig, LoRAConfig, ModelConfig


@dataclass(frozen=True)
class Matrix:
    """A matrix of a layer.

    Attributes:
        inputs: Its columns.
        outputs: Its rows.
        whole: Whether every tensor parallel rank holds all of it.
        joins: Whether it is split by its inputs, and its products are summed over ranks; otherwise by its outputs.
    """

    inputs: int
    outputs: int
    whole: bool = False
    joins: bool = False

    @property
    def size(self) -> int:
        """Number of its elements."""
        return self.inputs * self.outputs


def attention_matrices(model: ModelConfig) -> list[Matrix]:
    """The projections of a layer's attention, grouped-query or latent (DeepSeek-V2, section 2.1)."""
    hidden, heads = model.hidden, model.heads
    if model.attention == "gqa":
        channels = model.head_dim or hidden // heads
        queries, keys = heads * channels, model.kv_heads * channels
        return [
            Matrix(hidden, queries),
            Matrix(hidden, keys),
            Matrix(hidden, keys),
            Matrix(queries, hidden, joins=True),
        ]
    mla = model.mla
    per_query = heads * (mla.qk_head_dim + mla.qk_rope_dim)
    query_matrices = [Matrix(hidden, per_query)]
    if mla.q_lora_rank:
        query_matrices = [Matrix(hidden, mla.q_lora_rank, whole=True), Matrix(mla.q_lora_rank, per_query)]
    return [
        *query_matrices,
        Matrix(hidden, mla.kv_lora_rank + mla.qk_rope_dim, whole=True),
        Matrix(mla.kv_lora_rank, heads * (mla.qk_head_dim + mla.v_head_dim)),
        Matrix(heads * mla.v_head_dim, hidden, joins=True),
    ]


def gated(hidden: int, inner: int) -> list[Matrix]:
    """The three matrices of a gated feed-forward layer; none if its inner size is 0."""
    return [Matrix(hidden, inner), Matrix(hidden, inner), Matrix(inner, hidden, joins=True)] if inner else []


def numbers(matrices: list[Matrix], tp: int = 1) -> float:
    """Elements of the matrices that a tensor parallel rank holds."""
    return sum(matrix.size / (1 if matrix.whole else tp) for matrix in matrices)


def adapter_numbers(matrices: list[Matrix], rank: int, tp: int = 1) -> float:
    """Elements of the adapters of these matrices on a rank; see `models/adapters.py` for what is split."""
    # Only the factor on the side where the matrix itself is split is split as well: A has the inputs, B the outputs.
    split = {True: (tp, 1), False: (1, tp)}
    total = 0.0
    for matrix in matrices:
        of_inputs, of_outputs = (1, 1) if matrix.whole else split[matrix.joins]
        total += rank * (matrix.inputs / of_inputs + matrix.outputs / of_outputs)
    return total


@dataclass(frozen=True)
class LayerOps:
    """Operations of one token in the forward pass of a layer, on all GPUs that share it.

    Attributes:
        matmul: Products with matrices that every token meets: projections, dense feed-forward, shared expert, router.
        grouped: Products with routed experts.
        per_key: Attention, per token attended to.
        adapters: Adapters, which the others leave out.
    """

    matmul: float
    grouped: float
    per_key: float
    adapters: float


def met_matrices(model: ModelConfig, experts: bool) -> tuple[list[Matrix], list[Matrix]]:
    """The matrices of a layer, with experts or dense, that every token meets, no router; and those of an expert."""
    moe = model.moe
    mlp = gated(model.hidden, moe.shared_ffn_hidden if experts else model.ffn_hidden)
    return attention_matrices(model) + mlp, gated(model.hidden, moe.ffn_hidden) if experts else []


def layer_ops(model: ModelConfig, experts: bool, lora: LoRAConfig | None = None) -> LayerOps:
    """Operations of one token in a layer, with experts or dense."""
    moe = model.moe
    attention = attention_matrices(model)
    mlp = gated(model.hidden, moe.shared_ffn_hidden if experts else model.ffn_hidden)
    routed = gated(model.hidden, moe.ffn_hidden) if experts else []
    router = model.hidden * moe.experts if experts else 0
    adapters = 0.0
    if lora is not None and lora.rank:
        kinds = {"attention": (attention, 1), "mlp": (mlp, 1), "experts": (routed, moe.top_k)}
        met = [kinds[target] for target in lora.targets]
        adapters = sum(2 * times * adapter_numbers(matrices, lora.rank) for matrices, times in met)
    return LayerOps(
        matmul=2 * (numbers(attention) + numbers(mlp) + router),
        grouped=2 * moe.top_k * numbers(routed),
        per_key=2 * model.heads * sum(channels(model)),
        adapters=adapters,
    )


def channels(model: ModelConfig) -> tuple[int, int]:
    """Channels of a head's query and of its value."""
    if model.attention == "mla":
        return model.mla.qk_head_dim + model.mla.qk_rope_dim, model.mla.v_head_dim
    size = model.head_dim or model.hidden // model.heads
    return size, size


def keys_seen(lengths: Sequence[int], window: int | None = None, full_every: int = 0) -> float:
    """Tokens that a token of these sequences attends to in a layer, on average over tokens and layers.

    `window` and `full_every` are the model's.
    """
    total = sum(lengths)
    # Attention is causal: a token attends to half its sequence on average.
    full = sum(n * n / 2 for n in lengths) / total
    if window is None or window >= max(lengths):
        return full
    narrow = sum(n * n / 2 if n <= window else window * (n - window / 2) for n in lengths) / total
    share = 1 / full_every if full_every else 0.0
    return share * full + (1 - share) * narrow


def token_ops(model: ModelConfig, vocab_size: int, keys: float, predictors: bool = False) -> float:
    """Operations of a token in the forward pass of the whole model, with the output layer but not the embedding."""
    kinds = {experts: layer_ops(model, experts) for experts in (False, True)}
    each = {experts: ops.matmul + ops.grouped + ops.per_key * keys for experts, ops in kinds.items()}
    dense = dense_layers(model)
    head = 2 * model.hidden * vocab_size
    # A prediction module is a further layer and a further use of the output layer. Its projection joins a hidden state
    # and an embedding, 2 * hidden wide, to one of width hidden.
    ahead = model.mtp_layers * (each[bool(model.moe.experts)] + 4 * model.hidden**2 + head) if predictors else 0
    return dense * each[False] + (model.layers - dense) * each[True] + head + ahead


def dense_layers(model: ModelConfig) -> int:
    """Layers without experts."""
    return model.moe.first_dense if model.moe.experts else model.layers


def layers_of_stages(model: ModelConfig, layout: LayoutConfig) -> list[int]:
    """Layers of every pipeline stage, all its interleaved pieces together; `config/rules/layout.py` has the rules."""
    if layout.pp == 1:
        return [model.layers]
    given = {0: layout.first_stage_layers, layout.pp - 1: layout.last_stage_layers}
    rest = model.layers - sum(size or 0 for size in given.values())
    others = layout.pp - sum(size is not None for size in given.values())
    even = -(-rest // max(others, 1))
    return [given.get(number) or even for number in range(layout.pp)]


def model_numbers(model: ModelConfig, vocab_size: int) -> float:
    """Elements of the whole model's matrices, without prediction modules."""
    moe, dense = model.moe, dense_layers(model)
    routed = moe.experts * numbers(gated(model.hidden, moe.ffn_hidden)) + model.hidden * moe.experts
    sparse = routed + numbers(gated(model.hidden, moe.shared_ffn_hidden))
    body = model.layers * numbers(attention_matrices(model)) + (model.layers - dense) * sparse
    tables = 1 if model.tie_embeddings else 2
    return body + dense * numbers(gated(model.hidden, model.ffn_hidden)) + tables * model.hidden * vocab_size
