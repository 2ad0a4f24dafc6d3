"""Memory of the host for what leaves the device: no larger than it has to be, kept, and every byte its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.colocation.host_memory import SMALLEST, HostMemory, aligned, pieces_of


@given(size=st.integers(0, 1 << 40))
def test_pieces_are_what_torch_does_not_round_up_and_add_up_to_what_is_asked(size: int) -> None:
    pieces = pieces_of(size, SMALLEST)
    assert all(piece & (piece - 1) == 0 for piece in pieces)
    assert len({*pieces}) == len(pieces)
    assert size <= sum(pieces) < size + SMALLEST


@given(sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=12))
def test_what_is_kept_comes_back_though_it_lies_across_pieces(sizes: list[int]) -> None:
    memory = HostMemory(pin=False, smallest=512)
    memory.reserve(sum(map(aligned, sizes)))
    values = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    kept = [memory.take(size) for size in sizes]
    for value, parts in zip(values, kept, strict=True):
        for part, there in zip(parts, value.split([len(part) for part in parts]), strict=True):
            part.copy_(there)
    assert all(torch.equal(torch.cat(parts), value) for value, parts in zip(values, kept, strict=True))
    with pytest.raises(RuntimeError, match="2,000 bytes were asked for"):
        memory.take(2000)


def test_pieces_are_kept_from_trip_to_trip_and_given_up_when_they_are_too_many() -> None:
    memory = HostMemory(pin=False)

    def places(size: int) -> list[int]:
        memory.reserve(size)
        return [part.data_ptr() for part in memory.take(size)]

    first = places(3 * SMALLEST)
    assert len(first) == 2
    assert places(3 * SMALLEST) == first
    assert places(2 * SMALLEST) == first[:1]
    assert places(3 * SMALLEST - 5)[0] == first[0]
