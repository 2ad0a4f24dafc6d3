"""Attention by kernels for sequences of any length against the same in a table; the kernels are flash_oracle's.

Every one of their calls is checked there: types, strides, where sequences begin, sizes.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from flash_oracle import LIBRARY
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import limit
from megatron.core.transformer.transformer_config import TransformerConfig

from grpo_mega.config.schema import LayoutConfig, ModelConfig
from grpo_mega.models.megatron.attention import PackedAttention
from grpo_mega.models.megatron.packed import PackedTokens
from grpo_mega.models.megatron.runs import calls_of
from grpo_mega.models.megatron.varlen import attend, choose

assert LIBRARY
CPU = torch.device("cpu")
PROMPTS = [0, 1, 3, 6]
"""Tokens of each prompt."""

members = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7)), min_size=1, max_size=8)
"""(prompt, tokens after it) of each sequence."""
windows = st.none() | st.integers(1, 12)
channels = st.sampled_from([(8, 8), (12, 8), (6, 10), (16, 4)])
ratios = st.sampled_from([1, 3])
multiples = st.integers(1, 4)
seeds = st.integers(0, 2**31)


def of_members(sequences: list[tuple[int, int]], multiple: int, table: bool) -> PackedTokens:
    """The sequences with at least one token each."""
    prompts = torch.tensor([prompt for prompt, _ in sequences])
    shared = torch.tensor([PROMPTS[prompt] for prompt, _ in sequences])
    lengths = shared + torch.tensor([max(own, 1 - PROMPTS[prompt]) for prompt, own in sequences])
    return PackedTokens.of_sequences(lengths, multiple, prompts=prompts, prompt_lengths=shared, table=table)


def inputs(packed: PackedTokens, ratio: int, sizes: tuple[int, int], seed: int, dtype: torch.dtype) -> list:
    """Queries, keys and values of the E tokens, the same for tokens that are in the row once, and sinks."""
    random = torch.Generator().manual_seed(seed)
    keys, values = sizes
    shapes = ((2 * ratio, keys), (2, keys), (2, values))
    of_rows = [torch.randn(len(packed.owners), *shape, generator=random, dtype=dtype) for shape in shapes]
    of_tokens = [x[packed.rows] for x in of_rows]
    return [*of_tokens, torch.randn(2 * ratio, generator=random, dtype=dtype)]


def in_row(tokens: torch.Tensor, packed: PackedTokens) -> torch.Tensor:
    """[T, ...] of the E tokens' values; padding is no number, which nothing may read."""
    padding = tokens.new_full((packed.padding, *tokens.shape[1:]), torch.nan)
    return torch.cat([tokens[packed.owners], padding])


@settings(deadline=None, max_examples=40)
@given(members, multiples, ratios, channels, windows, st.booleans(), seeds)
def test_outputs_and_gradients_are_those_of_a_table(
    sequences: list, multiple: int, ratio: int, sizes: tuple[int, int], window: int | None, sinks: bool, seed: int
) -> None:
    found = []
    for table in (True, False):
        packed = of_members(sequences, multiple, table)
        query, key, value, sink = inputs(of_members(sequences, 1, True), ratio, sizes, seed, torch.float64)
        leaves = [x.requires_grad_() for x in ((query, key, value, sink) if sinks else (query, key, value))]
        config = TransformerConfig(num_layers=1, hidden_size=2 * ratio, num_attention_heads=2 * ratio)
        attention = PackedAttention(config, layer_number=1, softmax_scale=0.3, window=window)
        attention.softmax_offset = torch.nn.Parameter(sink.detach()) if sinks else None
        rows = [in_row(x, packed) for x in (query, key, value)]
        out = attention(*rows, None, packed_seq_params=packed)
        assert not out[len(packed.owners) :].any()
        upstream = torch.randn(out[packed.rows].shape, generator=torch.Generator().manual_seed(seed)).double()
        above = torch.ones_like(out).index_copy(0, packed.rows, torch.zeros_like(upstream))
        above = above.index_add(0, packed.rows, upstream)
        grads = torch.autograd.grad(out, [*leaves[:3], *attention.parameters()], above)
        found.append([out[packed.rows], *grads])
    off = 5e-6 if sinks else 1e-6  # a table rounds sinks, and sums of gradients, to float32
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= off * max(1.0, one.norm().item())


@settings(deadline=None, max_examples=30)
@given(members, st.sampled_from([1, 2, 4]), windows, st.booleans(), seeds)
def test_context_parallel_ranks_together_give_what_one_gives(
    sequences: list, size: int, window: int | None, sinks: bool, seed: int
) -> None:
    """Output of every rank's rows, and the sums over ranks of the gradients that each has of all keys and values."""
    packed = of_members(sequences, 2 * size, table=False)
    *tokens, sink = inputs(packed, 2, (8, 8), seed, torch.float64)
    rows = [in_row(x, packed).requires_grad_() for x in tokens]
    leaves = [*rows, *([sink.requires_grad_()] if sinks else [])]
    upstream = torch.randn(packed.total, 4, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    whole = attend(*rows, sink if sinks else None, packed.calls_in(window), None)
    expected = torch.autograd.grad(whole, leaves, upstream)
    total = [torch.zeros_like(x) for x in leaves]
    for rank in range(size):
        part = packed.sharded(rank, size)
        held = part.shard.rows if part.shard else torch.arange(packed.total)
        out = attend(rows[0][held], *rows[1:], sink if sinks else None, part.calls_in(window), None)
        torch.testing.assert_close(out, whole[held], atol=1e-12, rtol=1e-12)
        for so_far, more in zip(total, torch.autograd.grad(out, leaves, upstream[held]), strict=True):
            so_far += more
        assert len(part.calls_in(window)) <= (4 if size > 1 else 2)
        if window is None:
            assert all(isinstance(call.keys, slice) for call in part.calls_in(window))
    for one, other in zip(total, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("window", [None, 4])
def test_gradients_are_those_of_the_output(window: int | None) -> None:
    """By finite differences, of a group of three, one of two, and a sequence alone, with sinks."""
    packed = of_members([(3, 4), (2, 2), (3, 2), (1, 5), (2, 1), (3, 3)], 1, table=False)
    *tokens, sink = inputs(packed, 2, (8, 6), 3, torch.float64)
    leaves = [x.requires_grad_() for x in (*(in_row(x, packed) for x in tokens), sink)]
    calls = packed.calls_in(window)
    assert torch.autograd.gradcheck(lambda *x: attend(*x, calls, 0.4), leaves, fast_mode=True)


@settings(deadline=None)
@given(members)
def test_every_row_is_in_one_run_and_shared_prompts_come_before_their_branches(sequences: list) -> None:
    packed = of_members(sequences, 1, table=False)
    assert packed.runs is not None
    starts = [run.start for run in packed.runs]
    assert [*starts, len(packed.owners)] == [0, *(run.end for run in packed.runs)]
    shared = [run for run in packed.runs if run.prompt]
    assert shared == packed.runs[len(packed.runs) - len(shared) :]
    table = of_members(sequences, 1, table=True)
    assert packed.positions[packed.rows].tolist() == table.positions[table.rows].tolist()
    assert packed.copies[packed.rows].tolist() == table.copies[table.rows].tolist()


def test_a_group_is_two_calls_over_slices() -> None:
    """Five tokens of a prompt once, and three answers of 2, 4 and 3; a sequence of 7 of its own."""
    lengths = torch.tensor([7, 7, 9, 8])
    prompts, shared = torch.tensor([4, 8, 4, 4]), torch.tensor([5, 3, 5, 5])
    packed = PackedTokens.of_sequences(lengths, 1, prompts=prompts, prompt_lengths=shared, table=False)
    own, over_prompt = packed.calls_in(None)
    assert (own.rows, own.keys, own.causal) == (slice(0, 21), slice(0, 21), True)
    assert own.query_starts.tolist() == own.key_starts.tolist() == [0, 7, 12, 14, 18, 21]
    assert (over_prompt.rows, over_prompt.keys, over_prompt.causal) == (slice(12, 21), slice(7, 12), False)
    assert (over_prompt.query_starts.tolist(), over_prompt.key_starts.tolist()) == ([0, 9], [0, 5])


def test_a_rank_without_a_token_has_no_call() -> None:
    packed = PackedTokens.of_sequences(torch.tensor([3]), 8, table=False)
    assert packed.runs is not None
    assert calls_of(packed.runs, [(4, 8)], None) == []
    leaves = [torch.randn(4, 2, 8, requires_grad=True) for _ in range(3)] + [torch.zeros(2, requires_grad=True)]
    out = attend(*leaves, [], None)
    assert not out.any()
    assert all(not grad.any() for grad in torch.autograd.grad(out.sum(), leaves))


def test_a_batch_without_a_sequence_has_gradients_of_zero() -> None:
    """Megatron waits for one of every parameter in every micro-batch."""
    packed = PackedTokens.of_sequences(torch.tensor([], dtype=torch.int64), 4, table=False)
    leaves = [torch.randn(4, 2, 8, requires_grad=True) for _ in range(3)]
    out = attend(*leaves, None, packed.calls_in(None), None)
    assert out.shape == (4, 2, 8)
    assert all(not grad.any() for grad in torch.autograd.grad(out.sum(), leaves))


def test_cpus_have_tables_unless_a_kernel_is_asked_for() -> None:
    model = ModelConfig(layers=1, hidden=16, heads=2, kv_heads=2, ffn_hidden=16, context=16)
    assert choose(LayoutConfig(), model, CPU) == choose(LayoutConfig(attention="padded"), model, CPU) == "padded"
    assert choose(LayoutConfig(attention="torch"), model, CPU) == "torch"


@pytest.mark.parametrize("kernel", ["flash3", "flash4"])
def test_a_package_that_is_missing_is_named(kernel: str) -> None:
    model = ModelConfig(layers=1, hidden=16, heads=2, kv_heads=2, ffn_hidden=16, context=16)
    with pytest.raises(ValueError, match=f"layout.attention={kernel} needs flash_attn.*set layout.attention=torch"):
        choose(LayoutConfig(attention=kernel), model, CPU)


def test_a_cpu_without_the_kernel_is_refused() -> None:
    """In a process of its own, where nothing has made one."""
    program = """
from grpo_mega import platform
device = platform.start().device
from grpo_mega.config.schema import LayoutConfig
from grpo_mega.models.megatron.varlen import choose
choose(LayoutConfig(attention="torch"), None, device)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=limit(120))
    said = done.stderr.strip().splitlines()[-1]
    assert said == "ValueError: layout.attention=torch needs a GPU, and this is a CPU; set layout.attention=auto"
