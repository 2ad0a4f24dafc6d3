"""A vocabulary split over ranks gives what the whole one gives: the merge on its own, then real jobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks

from grpo_kernels import rows
from grpo_kernels.vocab_parallel import merge_stats

INF = float("inf")
JOB = Path(__file__).with_name("vocab_parallel_job.py")


@settings(deadline=None)
@given(
    st.sampled_from([2, 4, 8]),
    st.integers(1, 40),
    st.sampled_from([1.0, 0.5, 3.0]),
    st.sampled_from([0.0, 1e4, -1e4]),
    st.integers(0, 2**31),
)
def test_shards_merge_to_the_whole(
    shards: int, vocab_size: int, inv_temperature: float, offset: float, seed: int
) -> None:
    """Vocabularies smaller than the number of shards included: some shards hold padding alone."""
    generator = torch.Generator().manual_seed(seed)
    width = -(-vocab_size // shards)
    x = torch.randn(5, width * shards, generator=generator) * 4 + offset
    x[1, torch.rand(width * shards, generator=generator) < 0.6] = -INF
    x[1, vocab_size - 1] = offset
    x[2] += torch.linspace(0, 300, width * shards)  # shards that vanish beside others
    x[3, : width * shards // 2] = -INF
    x[3, vocab_size - 1] = offset
    x[:, vocab_size:] = float("nan")
    ids = torch.full((5,), vocab_size - 1)
    whole = rows.row_stats(x, ids, None, vocab_size, inv_temperature)
    parts = []
    for start in range(0, width * shards, width):
        columns = min(max(vocab_size - start, 0), width)
        parts.append(rows.row_stats(x[:, start : start + width], ids - start, None, columns, inv_temperature))
    merged = merge_stats(parts, inv_temperature)
    assert torch.equal(merged[:, [0, 3]], whole[:, [0, 3]])
    for found, expected in zip(
        rows.logprob_and_entropy(merged, inv_temperature), rows.logprob_and_entropy(whole, inv_temperature), strict=True
    ):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-6)


def test_a_row_of_nothing_but_minus_infinity_merges_to_one() -> None:
    part = torch.tensor([[-INF, 0.0, 0.0, -INF]])
    assert merge_stats([part, part, part], 2.0).tolist() == [[-INF, 0.0, 0.0, -INF]]


@pytest.mark.parametrize(("ranks", "vocab_sizes"), [(2, [37]), pytest.param(4, [61, 5], marks=pytest.mark.long)])
def test_tensor_parallel_ranks_find_what_one_finds(ranks: int, vocab_sizes: list[int]) -> None:
    """With 5 tokens on 4 ranks, three of them hold padding alone."""
    outputs = run_ranks(JOB, ranks, [str(size) for size in vocab_sizes])
    reports = [[json.loads(line) for line in output.strip().splitlines()[-len(vocab_sizes) :]] for output in outputs]
    for rank, of_rank in enumerate(reports):
        for report in of_rank:
            far = {name: distance for name, distance in report["found"].items() if not distance < 2e-5}
            assert not far, f"rank {rank} differs from the unsharded result: {far}"
    for of_vocabulary in zip(*reports, strict=True):
        digests = {report["digest"] for report in of_vocabulary}
        assert len(digests) == 1, "ranks differ in bits that all of them use"
