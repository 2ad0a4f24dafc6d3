"""Micro-batches are made one at a time, and a pass holds no more memory the more of them there are."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import results, run_ranks

from grpo_mega.models.megatron.packed import PackedTokens
from grpo_mega.models.microbatch import MicroBatches, micro_batches
from grpo_mega.models.topology import Topology
from grpo_mega.types import Batch, pack_tokens

LAYOUTS = ("cp2", "cp2recompute", "vpp2")
RESULTS = 8 * 512
"""Bytes for the results of a micro-batch: a log-prob of each of its tokens, and a copy."""
MASK = 2**17
"""Bytes of the mask of one micro-batch under context parallelism."""


@pytest.fixture(scope="module")
def held() -> dict[str, dict[str, dict[str, int]]]:
    """Layout -> pass -> number of micro-batches -> most bytes at once on the first of two ranks."""
    job = Path(__file__).with_name("pass_memory_job.py")
    return results(run_ranks(job, 2, [*LAYOUTS]))


@pytest.mark.long
@pytest.mark.parametrize("which", ["policy", "reference", "update"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_micro_batches_take_no_more_memory(layout: str, which: str, held: dict[str, Any]) -> None:
    """But for their results, and what gloo's threads happen to let go of late: 50 kB, seldom more, from run to run.

    Sixteen more masks would be 2 MB.
    """
    few, many = held[layout][which].items()
    assert int(few[0]) == 8
    assert int(many[0]) == 24
    assert many[1] - few[1] <= (24 - 8) * RESULTS + 2 * MASK


def of_batch(batch: Batch, topology: Topology) -> MicroBatches:
    return micro_batches(batch, topology, budget=20, device=torch.device("cpu"))


def test_they_are_made_anew_each_time_and_are_alike(batch: Batch, topology: Topology) -> None:
    micros = of_batch(batch, topology)
    first, second = list(micros), list(micros)
    assert len(micros) == len(first) > 2
    for one, other in zip(first, second, strict=True):
        assert one is not other
        assert torch.equal(one.scored.index, other.scored.index)
    scored = torch.cat([micro.scored.index for micro in first]).sort().values
    assert torch.equal(scored, batch.mask.nonzero()[:, 0])


@pytest.mark.parametrize("order", ["aabbccab", "abcabc", "aaabbbccc", "aaaa"])
def test_readers_get_the_same_objects_and_the_last_lets_them_go(order: str, batch: Batch, topology: Topology) -> None:
    """Pieces of the model read in an order of their own; what all of them have had is gone."""
    micros = of_batch(batch, topology)
    readers = dict(zip("abc", micros.readers(3), strict=True))
    seen: dict[str, list[weakref.ref]] = {name: [] for name in readers}
    for name in order:
        seen[name].append(weakref.ref(next(readers[name])))
    longest = max(seen.values(), key=len)
    passed = min(map(len, seen.values()))
    for refs in seen.values():
        assert [id(ref) for ref in refs] == [id(ref) for ref in longest[: len(refs)]]
    assert [ref() is None for ref in longest] == [number < passed for number in range(len(longest))]


def test_every_reader_comes_to_the_end(batch: Batch, topology: Topology) -> None:
    micros = of_batch(batch, topology)
    counts = [sum(1 for _ in reader) for reader in micros.readers(2)]
    assert counts == [len(micros)] * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_the_host_reads_stays_on_the_host(ranks: int) -> None:
    """Megatron's rotary embedding asks for these numbers in every layer; a GPU would be waited for each time."""
    packed = PackedTokens.of_sequences(torch.tensor([5, 2, 9]), 2 * ranks).sharded(0, ranks)
    moved = packed.to(torch.device("meta")).counted_by(2)
    assert moved.cu_seqlens_q.tolist() == moved.cu_seqlens_kv.tolist() == [0, 2 * packed.total]
    parts = [moved, moved.shard] if ranks > 1 else [moved]
    tensors = {name: x for part in parts for name, x in vars(part).items() if isinstance(x, torch.Tensor)}
    assert {name for name, x in tensors.items() if x.device.type != "meta"} == {"cu_seqlens_q", "cu_seqlens_kv"}
    assert len(tensors) > 8


@pytest.mark.parametrize(("cp_size", "cells"), [(1, 4), (2, 1)])
def test_tables_are_smaller_where_attention_needs_masks(cp_size: int, cells: int, topology: Topology) -> None:
    packed = pack_tokens([[1] * n for n in (16, *[2] * 30)], [1] * 31)
    micros = micro_batches(packed, replace(topology, cp_size=cp_size), 32, torch.device("cpu"))
    tables = [micro.packed.sequences * micro.packed.longest for micro in micros]
    assert cells * 32 - 16 < max(tables) <= cells * 32


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    groups=st.lists(
        st.tuples(st.integers(1, 12), st.lists(st.integers(0, 20), min_size=1, max_size=4)), min_size=1, max_size=5
    ),
    restarts=st.lists(st.lists(st.integers(0, 20), max_size=3), min_size=20, max_size=20),
    depths=st.integers(0, 2),
    cp_size=st.sampled_from([1, 2]),
    padded=st.booleans(),
)
def test_rows_are_known_before_a_micro_batch_is_made(
    groups: list[tuple[int, list[int]]],
    restarts: list[list[int]],
    depths: int,
    cp_size: int,
    padded: bool,
    topology: Topology,
) -> None:
    """Other pipeline stages count on them. Each group's sequences begin with its prompt, which is computed once."""
    shared = [prompt for prompt, answers in groups for _ in answers]
    lengths = [prompt + answer for prompt, answers in groups for answer in answers]
    prompts = torch.tensor([number for number, (_, answers) in enumerate(groups) for _ in answers])
    packed = pack_tokens([[1] * length for length in lengths], shared)
    packed = packed.with_(prompts=prompts, prompt_lengths=torch.tensor(shared))
    if any(restarts):
        packed = packed.with_(restarts=marked(packed, restarts))
    micros = micro_batches(
        packed, replace(topology, cp_size=cp_size), 40, torch.device("cpu"), depths=depths, padded=padded
    )
    made = list(micros)
    assert [micros.rows(plan) for plan in micros.plan] == [micro.packed.total for micro in made]
    for plan, micro in zip(micros.plan, made, strict=True):
        table = micro.packed.sequences * micro.packed.longest
        assert not padded or table <= (4 if cp_size == 1 else 1) * 40 or len({*micros.batch.numbers[plan].tolist()}) < 2


def marked(packed: Batch, restarts: list[list[int]]) -> torch.Tensor:
    """[T] True at these tokens of each completion, but for its first, and those that it lacks; they are not learned."""
    at = torch.zeros_like(packed.mask)
    begins = packed.cu_seqlens[:-1] + packed.prompt_lengths
    for first, end, of_sequence in zip(begins.tolist(), packed.cu_seqlens[1:].tolist(), restarts, strict=False):
        at[[first + restart for restart in of_sequence if 0 < restart < end - first]] = True
    packed.mask[at] = False
    return at
