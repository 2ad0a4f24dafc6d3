"""Table of the Hugging Face tensors of a model, with the rows of the Megatron tensor that hold each.

Every entry selects rows of one Megatron tensor, so one table serves both directions and every layout. An entry is a
Hugging Face tensor or, in GPT-OSS, one expert's part of one. Megatron's names are those of
`shards.named_box`, one for each layer and expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from grpo_mega.config.schema import ModelConfig
from grpo_mega.models.body import DTYPES, has_balancing_bias, head_channels, padded_vocabulary
from grpo_mega.models.families import layers_of
from grpo_mega.models.shards import Box
from grpo_mega.weights.hf_config import family_of

Region = tuple[slice, ...]
"""Part of a tensor: a slice of each axis."""


class Rows(NamedTuple):
    """Rows from `start` to below `stop` of every `period` rows."""

    period: int
    start: int
    stop: int


class Place(NamedTuple):
    """Position of one expert's rows in a Hugging Face tensor of all experts of a layer, [experts, columns, rows].

    Index `expert` of the first axis, and every `step`-th from `start` of the last.
    """

    expert: int
    start: int
    step: int


class NamedTensor(NamedTuple):
    """One Hugging Face tensor, or with a `place` a part of one; entries of the same name are consecutive.

    A tuple rather than a dataclass: a large model has 46,000 entries, and dataclasses take three times as long to
    create.

    Attributes:
        name: Name of the Hugging Face tensor.
        key: Name of the Megatron tensor that holds it.
        shape: Shape of the whole Hugging Face tensor.
        rows: Rows of the Megatron tensor; without a `place` the other axes are the same.
        dtype: Dtype in training.
        expert: Routed expert that it belongs to, None if it serves every token.
        joins_last: Whether it must be sent together with the tensor before it.
        place: Part of the tensor; None for all of it.
    """

    name: str
    key: str
    shape: tuple[int, ...]
    rows: Rows
    dtype: torch.dtype
    expert: int | None = None
    joins_last: bool = False
    place: Place | None = None

    @property
    def numel(self) -> int:
        """Number of elements of the tensor, or of this part of it."""
        whole = torch.Size(self.shape).numel()
        return whole // (self.shape[0] * self.place.step) if self.place else whole

    @property
    def bytes(self) -> int:
        """Size of the tensor, or of this part of it, in bytes."""
        return self.numel * self.dtype.itemsize

    def outwards(self, part: torch.Tensor) -> torch.Tensor:
        """A view of a part of the Megatron tensor, [rows, ...], in the orientation of the Hugging Face tensor."""
        return part.movedim(0, -1)[None] if self.place else part

    def inwards(self, part: torch.Tensor) -> torch.Tensor:
        """A view of a part of the Hugging Face tensor in the orientation of the Megatron tensor."""
        return part[0].movedim(-1, 0) if self.place else part

    def overlap(self, box: Box) -> Iterator[tuple[Region, Region]]:
        """Overlap of this tensor with a Megatron tensor's shard at `box`: pairs (slice of the shard, slice of this).

        A shard of fused rows has several pieces; `outwards` changes their orientation.
        """
        (top, bottom), *others = box
        whole, columns = tuple(slice(None) for _ in others), tuple(slice(*other) for other in others)
        # A Megatron tensor repeats blocks of `period` rows, e.g. the queries, key and value of each group. The entry's
        # rows are those from `start` to `stop` of every block; the shard may cut a block anywhere.
        period, start, stop = self.rows
        for block in range(top // period, -(-bottom // period)):
            base = block * period
            first, last = max(top, base + start), min(bottom, base + stop)
            if first < last:
                # Rows of the entry are contiguous in the Hugging Face tensor: earlier blocks contribute (stop - start)
                # rows each.
                shift = block * (stop - start) - base - start
                source = (slice(first - top, last - top), *whole)
                yield source, self._target(first + shift, last + shift, columns)

    def _target(self, first: int, last: int, columns: Region) -> Region:
        """Slice of the Hugging Face tensor for rows `first` to below `last` of those that this entry selects."""
        if self.place is None:
            return (slice(first, last), *columns)
        expert, start, step = self.place
        rows = slice(start + first * step, start + (last - 1) * step + 1, step)
        return (slice(expert, expert + 1), *columns, rows)


def size(part: Region) -> torch.Size:
    """Shape of a slice of a tensor."""
    return torch.Size([len(range(s.start, s.stop, s.step or 1)) for s in part])


def entries(model: ModelConfig, vocab_size: int) -> list[NamedTensor]:
    """All tensors of the model in the order of its layers, routed experts last.

    Raises:
        InputError: No supported family matches the model, see `family`.
    """
    family_of(model)
    # The sort is stable: within both halves the order of layers remains, on which buckets of all ranks rely.
    return sorted(_model(model, vocab_size), key=lambda entry: entry.expert is not None)


def copies(model: ModelConfig) -> dict[str, str]:
    """{name of a copy: name of its original} of tensors that a directory may store twice."""
    # With tied embeddings lm_head may be stored as well. DeepSeek-V3 stores the embedding and the output layer again in
    # every prediction module.
    output = "model.embed_tokens.weight" if model.tie_embeddings else "lm_head.weight"
    originals = {"lm_head.weight": output} if model.tie_embeddings else {}
    for layer in range(model.layers, model.layers + model.mtp_layers):
        originals[f"model.layers.{layer}.embed_tokens.weight"] = "model.embed_tokens.weight"
        originals[f"model.layers.{layer}.shared_head.head.weight"] = output
    return originals


def _model(model: ModelConfig, vocab_size: int) -> Iterator[NamedTensor]:
    hidden, moe = model.hidden, model.moe
    dtype = DTYPES[model.dtype]
    vocabulary = Rows(padded_vocabulary(model, vocab_size), 0, vocab_size)
    yield _entry(
        "model.embed_tokens.weight", "embedding.word_embeddings.weight", (vocab_size, hidden), dtype, vocabulary
    )
    # The entries of a layer are made once with experts and once without, and only renamed for each layer: a layer of
    # 256 experts has 780 tensors.
    of_kind: dict[bool, list[NamedTensor]] = {}
    for layer in range(model.layers):
        has_experts = moe.experts > 0 and moe.first_dense <= layer
        if has_experts not in of_kind:
            of_kind[has_experts] = list(_layer(model, dtype, has_experts))
        yield from _inside(of_kind[has_experts], f"model.layers.{layer}.", f"decoder.layers.{layer}.")
    for depth in range(model.mtp_layers):
        # A multi-token prediction module shares the embedding and the output layer.
        own = [
            _entry("enorm.weight", "enorm.weight", (hidden,), dtype),
            _entry("hnorm.weight", "hnorm.weight", (hidden,), dtype),
            _entry("eh_proj.weight", "eh_proj.weight", (hidden, 2 * hidden), dtype),
            *_inside(_layer(model, dtype, has_experts=True), "", "transformer_layer."),
            _entry("shared_head.norm.weight", "final_layernorm.weight", (hidden,), dtype),
        ]
        yield from _inside(own, f"model.layers.{model.layers + depth}.", f"mtp.layers.{depth}.")
    yield _entry("model.norm.weight", "decoder.final_layernorm.weight", (hidden,), dtype)
    if not model.tie_embeddings:
        yield _entry("lm_head.weight", "output_layer.weight", (vocab_size, hidden), dtype, vocabulary)


def _layer(model: ModelConfig, dtype: torch.dtype, has_experts: bool) -> Iterator[NamedTensor]:
    hidden = model.hidden
    yield _entry("input_layernorm.weight", "input_layernorm.weight", (hidden,), dtype)
    attention = _latent_attention if model.attention == "mla" else _grouped_attention
    yield from _inside(attention(model, dtype), "self_attn.", "self_attention.")
    layers = layers_of(model.family)
    if layers.post_norms:
        yield _entry("post_attention_layernorm.weight", "self_attention.linear_proj.post_norm.weight", (hidden,), dtype)
        yield _entry("pre_feedforward_layernorm.weight", "pre_mlp_layernorm.weight", (hidden,), dtype)
        yield _entry("post_feedforward_layernorm.weight", "mlp.linear_fc2.post_norm.weight", (hidden,), dtype)
    else:
        yield _entry("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", (hidden,), dtype)
    routed = _stacked_experts if layers.stacked else _experts
    feed_forward = routed(model, dtype) if has_experts else _gated(hidden, model.ffn_hidden, dtype)
    yield from _inside(feed_forward, "mlp.", "mlp.")


def _grouped_attention(model: ModelConfig, dtype: torch.dtype) -> Iterator[NamedTensor]:
    """Attention tensors; Megatron fuses the queries, the key and the value of each group, group after group."""
    hidden, channels = model.hidden, head_channels(model)
    queries = model.heads // model.kv_heads * channels
    fused = queries + 2 * channels
    q, kv = (model.heads * channels, hidden), (model.kv_heads * channels, hidden)
    yield _entry("q_proj.weight", "linear_qkv.weight", q, dtype, Rows(fused, 0, queries))
    yield _entry("k_proj.weight", "linear_qkv.weight", kv, dtype, Rows(fused, queries, queries + channels))
    yield _entry("v_proj.weight", "linear_qkv.weight", kv, dtype, Rows(fused, queries + channels, fused))
    if model.qkv_bias:
        yield _entry("q_proj.bias", "linear_qkv.bias", q[:1], dtype, Rows(fused, 0, queries))
        yield _entry("k_proj.bias", "linear_qkv.bias", kv[:1], dtype, Rows(fused, queries, queries + channels))
        yield _entry("v_proj.bias", "linear_qkv.bias", kv[:1], dtype, Rows(fused, queries + channels, fused))
    yield _entry("o_proj.weight", "linear_proj.weight", (hidden, model.heads * channels), dtype)
    layers = layers_of(model.family)
    if layers.biased:
        yield _entry("o_proj.bias", "linear_proj.bias", (hidden,), dtype)
    if layers.sinks:
        yield _entry("sinks", "core_attention.softmax_offset", (model.heads,), dtype)
    if model.qk_norm:
        yield _entry("q_norm.weight", "q_layernorm.weight", (channels,), dtype)
        yield _entry("k_norm.weight", "k_layernorm.weight", (channels,), dtype)


def _latent_attention(model: ModelConfig, dtype: torch.dtype) -> Iterator[NamedTensor]:
    hidden, heads, mla = model.hidden, model.heads, model.mla
    q_rank, kv_rank, rope = mla.q_lora_rank, mla.kv_lora_rank, mla.qk_rope_dim
    queries = heads * (mla.qk_head_dim + rope)
    kv_a = _entry("kv_a_proj_with_mqa.weight", "linear_kv_down_proj.weight", (kv_rank + rope, hidden), dtype)
    if q_rank is None:
        yield _entry("q_proj.weight", "linear_q_proj.weight", (queries, hidden), dtype)
        yield kv_a
    else:
        yield _entry("q_a_proj.weight", "linear_q_down_proj.weight", (q_rank, hidden), dtype)
        # SGLang fuses q_a_proj and kv_a_proj into one matrix when it receives both in one update, and silently drops
        # one that comes alone: they must share a bucket.
        yield kv_a._replace(joins_last=True)
        yield _entry("q_a_layernorm.weight", "q_layernorm.weight", (q_rank,), dtype)
        yield _entry("q_b_proj.weight", "linear_q_up_proj.weight", (queries, q_rank), dtype)
    yield _entry("kv_a_layernorm.weight", "kv_layernorm.weight", (kv_rank,), dtype)
    up = (heads * (mla.qk_head_dim + mla.v_head_dim), kv_rank)
    yield _entry("kv_b_proj.weight", "linear_kv_up_proj.weight", up, dtype)
    yield _entry("o_proj.weight", "linear_proj.weight", (hidden, heads * mla.v_head_dim), dtype)


def _gated(hidden: int, inner: int, dtype: torch.dtype) -> Iterator[NamedTensor]:
    """Tensors of a gated feed-forward layer; Megatron fuses the gate and its factor."""
    yield _entry("gate_proj.weight", "linear_fc1.weight", (inner, hidden), dtype, Rows(2 * inner, 0, inner))
    yield _entry("up_proj.weight", "linear_fc1.weight", (inner, hidden), dtype, Rows(2 * inner, inner, 2 * inner))
    yield _entry("down_proj.weight", "linear_fc2.weight", (hidden, inner), dtype)


def _experts(model: ModelConfig, dtype: torch.dtype) -> Iterator[NamedTensor]:
    moe = model.moe
    yield _entry("gate.weight", "router.weight", (moe.experts, model.hidden), dtype)
    # The balancing bias stays in fp32 whatever the model's precision.
    if has_balancing_bias(moe):
        yield _entry("gate.e_score_correction_bias", "router.expert_bias", (moe.experts,), torch.float32)
    for number in range(moe.experts):
        one = _inside(_gated(model.hidden, moe.ffn_hidden, dtype), f"experts.{number}.", f"experts.{number}.")
        yield from (entry._replace(expert=number) for entry in one)
    if moe.shared_ffn_hidden:
        yield from _inside(_gated(model.hidden, moe.shared_ffn_hidden, dtype), "shared_experts.", "shared_experts.")


def _stacked_experts(model: ModelConfig, dtype: torch.dtype) -> Iterator[NamedTensor]:
    """Expert tensors of a family that stores all experts in one; rows of the gate and its factor alternate."""
    hidden, inner, experts = model.hidden, model.moe.ffn_hidden, model.moe.experts
    yield _entry("router.weight", "router.weight", (experts, hidden), dtype)
    yield _entry("router.bias", "router.bias", (experts,), dtype)
    gate, factor, all_rows = Rows(2 * inner, 0, inner), Rows(2 * inner, inner, 2 * inner), Rows(hidden, 0, hidden)
    for name, layer, shape, parts in (
        ("gate_up_proj", "linear_fc1.weight", (experts, hidden, 2 * inner), (gate, factor)),
        ("gate_up_proj_bias", "linear_fc1.bias", (experts, 2 * inner), (gate, factor)),
        ("down_proj", "linear_fc2.weight", (experts, inner, hidden), (all_rows,)),
        ("down_proj_bias", "linear_fc2.bias", (experts, hidden), (all_rows,)),
    ):
        for expert in range(experts):
            for start, rows in enumerate(parts):
                entry = _entry(f"experts.{name}", f"experts.{expert}.{layer}", shape, dtype, rows)
                place = Place(expert, start, len(parts))
                # All parts of such a tensor share a name: they must travel in one bucket, or a receiver would get an
                # incomplete tensor.
                yield entry._replace(expert=expert, place=place, joins_last=expert + start > 0)


def _entry(name: str, key: str, shape: tuple[int, ...], dtype: torch.dtype, rows: Rows | None = None) -> NamedTensor:
    """An entry; by default with all rows of the Megatron tensor."""
    return NamedTensor(name, key, shape, rows or Rows(shape[0], 0, shape[0]), dtype)


def _inside(parts: Iterable[NamedTensor], name: str, key: str) -> Iterator[NamedTensor]:
    return (part._replace(name=name + part.name, key=key + part.key) for part in parts)
