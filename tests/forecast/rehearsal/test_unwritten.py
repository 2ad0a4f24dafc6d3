"""Large tensors on the host are allocated and not written; everything else is as it was."""

from __future__ import annotations

import resource

import torch

from grpo_mega.forecast.rehearsal.unwritten import SMALL, UnwrittenHost


def resident() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_memory_that_is_copied_to_takes_none() -> None:
    before, size = resident(), 1 << 30
    with UnwrittenHost():
        whole = torch.zeros(2 * size, dtype=torch.uint8)
        parts = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
        whole[:size].copy_(parts[0])
        joined = torch.cat(parts)
        again = joined.clone()
    assert (len(joined), len(again)) == (2 * size, 2 * size)
    assert resident() - before < size / 2  # what torch imports meanwhile


def test_more_may_be_asked_for_than_there_is() -> None:
    with UnwrittenHost():
        whole = torch.zeros(1 << 42, dtype=torch.uint8)  # 4 TiB
        assert whole[:4].tolist() == [0] * 4
        assert torch.zeros(4, 1 << 20).t().clone().shape == (1 << 20, 4)


def test_small_ones_have_their_numbers() -> None:
    with UnwrittenHost():
        small = torch.zeros(4).copy_(torch.arange(4.0))
        joined = torch.cat([small, small.clone()])
        some = torch.cat([torch.ones(SMALL), small])
    assert joined.tolist() == [0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0, 3.0]
    assert (len(some), float(some[-1])) == (SMALL + 4, 3.0)
    assert torch.zeros(2 * SMALL).copy_(torch.ones(2 * SMALL)).sum() == 2 * SMALL
