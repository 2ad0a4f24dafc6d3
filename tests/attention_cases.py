"""Attention over packed rows: cases, what a kernel gives for them, and how far bf16 may be from float64.

Used on CPUs, where `flash_oracle` stands for the kernels (tests/models/test_varlen.py), and on GPUs
(tests/gpu/test_gpu_attention.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from grpo_mega import platform

platform.start()  # before megatron.core is imported

from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from grpo_mega.models.megatron.attention import PackedAttention  # noqa: E402
from grpo_mega.models.megatron.packed import PackedTokens  # noqa: E402
from grpo_mega.models.megatron.varlen import attend  # noqa: E402

Tensor = torch.Tensor
Members = Sequence[tuple[int, int]]
"""(prompt, tokens after it) of each sequence."""

PROMPTS = [0, 1, 3, 6]
"""Tokens of each prompt."""
LONG_PROMPTS = [0, 1, 130, 257]
"""The same, of more tokens than a kernel's block has, which are 64 to 176."""
ROWS: dict[str, Members] = {
    "alone": [(0, 1), (0, 2), (0, 127), (0, 128), (0, 129), (0, 300)],
    "a group": [(3, 1), (3, 64), (3, 200), (3, 33)],
    "groups and others": [(2, 5), (3, 140), (0, 77), (2, 0), (3, 1), (1, 190), (2, 128), (1, 3)],
}
"""Sequences with LONG_PROMPTS."""
HEADS = {
    "DeepSeekMath": (128, 128, 1),
    "Qwen3": (128, 128, 8),
    "Qwen2.5-0.5B": (64, 64, 7),
    "toy": (24, 24, 2),
    "DeepSeek-V3": (192, 128, 1),
}
"""Channels of queries and keys, those of values, and queries' heads for each of the two heads of keys."""
KINDS = {"": (None, False), "sinks": (None, True), "window": (100, False), "narrow window, sinks": (5, True)}
"""Window, and whether heads have sinks."""
SCALE = 0.3

ROUNDING = 2.0**-8
"""Most that rounding to bf16 changes a number by, relative to it: it keeps 8 binary digits."""
ROUNDINGS = {"output": 4, "queries": 7, "keys": 8, "values": 4, "sinks": 5}
"""How many roundings to bf16 lie one after the other on the way to a result.

Output: probabilities, before their product with values; the output of a call; the merge of two calls; that with a sink.
Queries' gradient: the output with its four, which is in D; the gradient of the logits; a call's result; the sum of two.
Keys': the same, and the sum over the queries' heads that share a key. Values': probabilities, a call's result, the sum
over heads, that over calls. Sinks': the output with its four, and the result.
"""


def of_members(sequences: Members, multiple: int, table: bool, prompt_lengths: Sequence[int] = PROMPTS) -> PackedTokens:
    """The sequences with at least one token each."""
    prompts = torch.tensor([prompt for prompt, _ in sequences])
    shared = torch.tensor([prompt_lengths[prompt] for prompt, _ in sequences])
    lengths = shared + torch.tensor([max(own, 1 - prompt_lengths[prompt]) for prompt, own in sequences])
    return PackedTokens.of_sequences(lengths, multiple, prompts=prompts, prompt_lengths=shared, table=table)


def inputs(packed: PackedTokens, ratio: int, sizes: tuple[int, int], seed: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values of the E tokens, the same for tokens that are in the row once, and sinks."""
    random = torch.Generator().manual_seed(seed)
    keys, values = sizes
    shapes = ((2 * ratio, keys), (2, keys), (2, values))
    of_rows = [torch.randn(len(packed.owners), *shape, generator=random, dtype=dtype) for shape in shapes]
    of_tokens = [x[packed.rows] for x in of_rows]
    return [*of_tokens, torch.randn(2 * ratio, generator=random, dtype=dtype)]


def in_row(tokens: Tensor, packed: PackedTokens) -> Tensor:
    """[T, ...] of the E tokens' values; padding is no number, which nothing may read."""
    padding = tokens.new_full((packed.padding, *tokens.shape[1:]), torch.nan)
    return torch.cat([tokens[packed.owners], padding])


def attended(
    packed: PackedTokens,
    tokens: Sequence[Tensor],
    sinks: Tensor | None,
    window: int | None,
    upstream: Tensor,
    scale: float = SCALE,
) -> list[Tensor]:
    """A layer's output for the E tokens, and the gradients of their queries, keys, values, and of sinks.

    Args:
        packed: In a table, or in runs for kernels.
        tokens: Queries, keys and values of the E tokens.
        sinks: [heads], or None.
        window: Tokens that a token sees.
        upstream: [E, heads * value channels] gradient of the output.
        scale: Of the logits.
    """
    heads = tokens[0].shape[1]
    config = TransformerConfig(num_layers=1, hidden_size=heads, num_attention_heads=heads)
    attention = PackedAttention(config, layer_number=1, softmax_scale=scale, window=window)
    attention.softmax_offset = None if sinks is None else torch.nn.Parameter(sinks.detach())
    leaves = [x.detach().requires_grad_() for x in tokens]
    out = attention(*(in_row(x, packed) for x in leaves), None, packed_seq_params=packed)
    assert not out[len(packed.owners) :].any()
    # A row that several tokens share has the sum of their gradients, and padding has some.
    above = torch.ones_like(out).index_copy(0, packed.rows, torch.zeros_like(upstream))
    above = above.index_add(0, packed.rows, upstream)
    grads = torch.autograd.grad(out, [*leaves, *attention.parameters()], above)
    return [out.detach()[packed.rows], *grads]


def of_ranks(
    packed: PackedTokens,
    size: int,
    rows: Sequence[Tensor],
    sinks: Tensor | None,
    window: int | None,
    upstream: Tensor,
    scale: float | None = None,
) -> list[Tensor]:
    """What `size` context parallel ranks give together: outputs of all rows, and the sums of their gradients.

    Args:
        packed: In runs, T a multiple of 2 * size.
        size: Number of ranks.
        rows: Queries, keys and values of the T rows.
        sinks, window, scale: See `attended`.
        upstream: [T, heads, value channels] gradient of the output.
    """
    leaves = [x.detach().requires_grad_() for x in (*rows, *([] if sinks is None else [sinks]))]
    whole = torch.zeros_like(upstream)
    total = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in leaves]
    for rank in range(size):
        part = packed.sharded(rank, size)
        held = part.shard.rows if part.shard else torch.arange(packed.total, device=rows[0].device)
        of_sinks = None if sinks is None else leaves[3]
        out = attend(leaves[0][held], *leaves[1:3], of_sinks, part.calls_in(window), scale)
        whole[held] = out.detach()
        for so_far, more in zip(total, torch.autograd.grad(out, leaves, upstream[held]), strict=True):
            so_far += more
    return [whole, *total]


def check_in_bf16(members: str, heads: str, kind: str, device: torch.device, table: bool = False) -> None:
    """Attention in bf16 on this device, by kernels or in a `table`, against a table in float64."""
    (keys, values, ratio), (window, with_sinks) = HEADS[heads], KINDS[kind]
    reference, packed = (of_members(ROWS[members], 8, in_table, LONG_PROMPTS) for in_table in (True, table))
    *tokens, sinks = _leaning(inputs(reference, ratio, (keys, values), 3, torch.float64))
    scale = keys**-0.5
    upstream = _whole_numbers(len(reference.rows), 2 * ratio * values)
    sinks = sinks if with_sinks else None
    wide = [x.double() for x in tokens], sinks.double() if with_sinks else None
    there = [x.to(device) for x in tokens], sinks.to(device) if with_sinks else None
    exact = attended(reference, *wide, window, upstream.double(), scale)
    found = attended(packed.to(device), *there, window, upstream.to(device), scale)
    shape = (len(upstream), 2 * ratio, values)  # of the output, which a layer gives without a dimension of heads
    assert_close_in_bf16(
        [found[0].cpu().view(shape), *(x.cpu() for x in found[1:])], [exact[0].view(shape), *exact[1:]]
    )


def check_ranks_in_bf16(members: str, heads: str, kind: str, size: int, device: torch.device) -> None:
    """The kernels' calls of context parallel ranks, whose queries begin in the middle of sequences, as above.

    In float64 one rank computes all, for which there is a kernel on CPUs: that of flash_oracle.
    """
    (keys, values, ratio), (window, with_sinks) = HEADS[heads], KINDS[kind]
    packed = of_members(ROWS[members], 2 * size, False, LONG_PROMPTS)
    *tokens, sinks = _leaning(inputs(packed, ratio, (keys, values), 3, torch.float64))
    rows = [in_row(x, packed) for x in tokens]
    sinks = sinks if with_sinks else None
    upstream = _whole_numbers(packed.total, 2 * ratio, values)
    wide = [x.double() for x in rows], sinks.double() if with_sinks else None
    there = [x.to(device) for x in rows], sinks.to(device) if with_sinks else None
    exact = of_ranks(packed, 1, *wide, window, upstream.double())
    found = of_ranks(packed.to(device), size, *there, window, upstream.to(device))
    assert_close_in_bf16([x.cpu() for x in found], exact)


def assert_close_in_bf16(found: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    """Results of `attended` are as near to those in float64 as their ROUNDINGS allow.

    In the worst case errors are relative to sums of absolute values. But roundings are as often up as down, and what
    cancels out of a sum cancels out of its error as well, so the size of the result is the measure. Outputs and values'
    gradients, which are averages, are so near in every row (the channels of a token in one head), small ones in
    relation to most. The gradient of a query's logits is a small difference of the large numbers do v and D where one
    key has nearly all of its attention: those of queries and keys are measured all together.
    """
    for name, one, other in zip(ROUNDINGS, found, exact):  # noqa: B905, as there may be no sinks
        assert one.isfinite().all(), name
        error, size = (one.double() - other).norm(dim=-1), other.norm(dim=-1)
        typical = size.square().mean().sqrt()
        mean, worst = error.norm() / size.norm() / ROUNDING, (error / size.clamp(min=typical)).max() / ROUNDING
        assert mean <= ROUNDINGS[name], f"{name}: off by {mean:.1f} roundings of {ROUNDINGS[name]}"
        if name in ("output", "values"):
            assert worst <= ROUNDINGS[name], f"{name}: off by {worst:.1f} roundings of {ROUNDINGS[name]} in a row"


def _leaning(tokens_and_sinks: Sequence[Tensor]) -> list[Tensor]:
    """Of `inputs` in bf16; values, as the output's gradient, lean to one side, so that sinks' gradients add up."""
    query, key, value, sinks = tokens_and_sinks
    return [x.bfloat16() for x in (query, key, value + 1, sinks)]


def _whole_numbers(*shape: int) -> Tensor:
    """Gradients in bf16, of which sums over the tokens that share a row are exact."""
    return torch.randint(-3, 6, shape, generator=torch.Generator().manual_seed(4)).bfloat16()
