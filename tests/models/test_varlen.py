"""Attention by kernels for sequences of any length against the same in a table; the kernels are flash_oracle's.

Every one of their calls is checked there: types, strides, where sequences begin, sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from attention_cases import (
    KINDS,
    ROWS,
    attended,
    check_in_bf16,
    check_ranks_in_bf16,
    in_row,
    inputs,
    of_members,
    of_ranks,
)  # fmt: skip
from flash_oracle import LIBRARY
from forks import run_python
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import (
    activate_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)

from grpo_mega.config.schema import LayoutConfig, ModelConfig
from grpo_mega.errors import InputError
from grpo_mega.models.megatron.packed import PackedTokens
from grpo_mega.models.megatron.runs import calls_of
from grpo_mega.models.megatron.varlen import attend, choose

assert LIBRARY
CPU = torch.device("cpu")
members = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7)), min_size=1, max_size=8)
windows = st.none() | st.integers(1, 12)
channels = st.sampled_from([(8, 8), (12, 8), (6, 10), (16, 4)])
ratios = st.sampled_from([1, 3])
multiples = st.integers(1, 4)
seeds = st.integers(0, 2**31)


@settings(deadline=None, max_examples=40)
@given(members, multiples, ratios, channels, windows, st.booleans(), seeds)
def test_outputs_and_gradients_are_those_of_a_table(
    sequences: list, multiple: int, ratio: int, sizes: tuple[int, int], window: int | None, sinks: bool, seed: int
) -> None:
    found = []
    query, key, value, sink = inputs(of_members(sequences, 1, True), ratio, sizes, seed, torch.float64)
    generator = torch.Generator().manual_seed(seed)
    upstream = torch.randn(len(query), 2 * ratio * sizes[1], generator=generator).double()
    for table in (True, False):
        packed = of_members(sequences, multiple, table)
        found.append(attended(packed, (query, key, value), sink if sinks else None, window, upstream))
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
    rows = [in_row(x, packed) for x in tokens]
    upstream = torch.randn(packed.total, 4, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    whole, parts = (of_ranks(packed, n, rows, sink if sinks else None, window, upstream) for n in (1, size))
    for one, other in zip(parts, whole, strict=True):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=1e-11)
    for rank in range(size):
        calls = packed.sharded(rank, size).calls_in(window)
        assert len(calls) <= (4 if size > 1 else 2)
        if window is None:
            assert all(isinstance(call.keys, slice) for call in calls)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", ["toy", "DeepSeek-V3"])
@pytest.mark.parametrize("members", ROWS)
def test_bf16_is_off_by_its_roundings(members: str, heads: str, kind: str) -> None:
    """What tests/gpu demands of kernels, of one that rounds where they do."""
    check_in_bf16(members, heads, kind, CPU)


@pytest.mark.parametrize("kind", KINDS)
def test_context_parallel_ranks_in_bf16_are_off_by_its_roundings(kind: str) -> None:
    check_ranks_in_bf16("groups and others", "toy", kind, 2, CPU)


@pytest.mark.parametrize("window", [None, 4])
def test_gradients_are_those_of_the_output(window: int | None) -> None:
    """By finite differences, of a group of three, one of two, and a sequence alone, with sinks."""
    packed = of_members([(3, 4), (2, 2), (3, 2), (1, 5), (2, 1), (3, 3)], 1, table=False)
    *tokens, sink = inputs(packed, 2, (8, 6), 3, torch.float64)
    leaves = [x.requires_grad_() for x in (*(in_row(x, packed) for x in tokens), sink)]
    calls = packed.calls_in(window)
    assert torch.autograd.gradcheck(lambda *x: attend(*x, calls, 0.4), leaves, fast_mode=True)


class Handle:
    """What torch holds of a kernel that stands in its own's place; here the same stays there."""

    def remove(self) -> None: ...


@pytest.fixture
def another_kernel() -> Iterator[None]:
    """One that torch was told to use, as it is told of FlashAttention-3 and 4: values may be narrower than keys."""
    register_flash_attention_impl("oracle", register_fn=Handle)
    activate_flash_attention_impl("oracle")
    yield
    restore_flash_attention_impl()


@pytest.mark.usefixtures("another_kernel")
def test_values_keep_their_width_in_kernels_that_take_it() -> None:
    check_in_bf16("groups and others", "DeepSeek-V3", "sinks", CPU)
    check_ranks_in_bf16("groups and others", "DeepSeek-V3", "", 2, CPU)


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
    with pytest.raises(InputError, match=f"layout.attention={kernel}: needs flash_attn.*set layout.attention=torch"):
        choose(LayoutConfig(attention=kernel), model, CPU)


def test_a_cpu_without_the_kernel_is_refused(tmp_path: Path) -> None:
    """In a process of its own, where nothing has made one."""
    program = """
from grpo_mega import platform
device = platform.start().device
from grpo_mega.config.schema import LayoutConfig
from grpo_mega.models.megatron.varlen import choose
choose(LayoutConfig(attention="torch"), None, device)
"""
    (tmp_path / "program.py").write_text(program)
    done = run_python(tmp_path / "program.py")
    *_, last = done.stderr.strip().splitlines()
    assert last.startswith("grpo_mega.errors.InputError: layout.attention=torch: needs a GPU")
    assert last.endswith("; set layout.attention=auto")
