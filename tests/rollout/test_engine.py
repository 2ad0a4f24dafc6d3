"""How finished samples are distributed over ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.rollout.engine import round_robin


@given(st.integers(1, 5), st.lists(st.integers(0, 7), max_size=6))
def test_ranks_take_turns_over_several_calls(ranks: int, sizes: list[int]) -> None:
    """Each item falls to one rank, the next one to the next rank, also when that is in another call."""
    distributed = 0
    holders: list[int] = []
    for size in sizes:
        parts = [round_robin(range(size), rank, ranks, distributed) for rank in range(ranks)]
        holders += [next(rank for rank, part in enumerate(parts) if item in part) for item in range(size)]
        assert sum(map(len, parts)) == size
        distributed += size
    assert holders == [item % ranks for item in range(distributed)]
