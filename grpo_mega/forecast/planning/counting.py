"""Parameters and operations of a model and of its layers, counted from matrices, for the planner.

Totals of a model come from `models/flops.py`, which counts them for a run's MFU. A layer's times and its share on a
rank also depend on the shapes of its matrices and on how they are split, which are here; test_counting.py checks that
these add up to those totals.

An operation is a multiplication or an addition: a product with a matrix takes two per number and token. Norms, biases
and activations count as bytes moved (`memory.layer_bytes`), not as operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from grpo_mega.config.derived import key_channels
from grpo_mega.config.schema import LayoutConfig, LoRAConfig, ModelConfig
from grpo_mega.models.flops import layer_weights


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


def layer_matrices(model: ModelConfig, experts: bool) -> tuple[list[Matrix], list[Matrix], list[Matrix]]:
    """The matrices of a layer, with experts or dense: attention, dense or shared feed-forward, one routed expert."""
    moe = model.moe
    mlp = gated(model.hidden, moe.shared_ffn_hidden if experts else model.ffn_hidden)
    return attention_matrices(model), mlp, gated(model.hidden, moe.ffn_hidden) if experts else []


def layer_ops(model: ModelConfig, experts: bool, lora: LoRAConfig | None = None) -> LayerOps:
    """Operations of one token in a layer, with experts or dense."""
    moe = model.moe
    attention, mlp, routed = layer_matrices(model, experts)
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
    keys = key_channels(model)
    return keys, model.mla.v_head_dim if model.attention == "mla" else keys


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


def token_ops(model: ModelConfig, vocab_size: int, keys: float) -> float:
    """Operations of a token that attends to `keys` others in the forward pass of the whole model, without prediction
    modules: all layers and the output layer, but not the embedding."""
    weights = layer_weights(replace(model, mtp_layers=0)) + model.hidden * vocab_size
    return 2.0 * weights + model.layers * layer_ops(model, experts=False).per_key * keys


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


def model_numbers(model: ModelConfig, vocab_size: int) -> int:
    """Elements of the whole model's matrices, without prediction modules."""
    # A token that is sent to all experts is multiplied with every weight of the layers.
    everywhere = replace(model, mtp_layers=0, moe=replace(model.moe, top_k=model.moe.experts))
    return layer_weights(everywhere) + (1 if model.tie_embeddings else 2) * model.hidden * vocab_size
