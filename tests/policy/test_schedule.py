"""The invariants that schedule.py states, for any lengths."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.policy.schedule import schedule

lengths_of_sequences = st.lists(st.integers(1, 60), max_size=50)
replica_counts = st.integers(1, 9)
budgets = st.integers(1, 100)


@given(lengths_of_sequences, replica_counts, budgets)
def test_every_sequence_is_placed_exactly_once(lengths: list[int], replicas: int, budget: int) -> None:
    plan = schedule(lengths, replicas, budget)
    assert len(plan) == replicas
    assert sorted(i for replica in plan for micro in replica for i in micro) == list(range(len(lengths)))


@given(lengths_of_sequences, replica_counts, budgets)
def test_replicas_have_equally_many_micro_batches_and_never_none(
    lengths: list[int], replicas: int, budget: int
) -> None:
    counts = {len(replica) for replica in schedule(lengths, replicas, budget)}
    assert len(counts) == 1
    assert counts.pop() >= 1


@given(lengths_of_sequences, replica_counts, budgets)
def test_only_a_longer_sequence_alone_exceeds_the_budget(lengths: list[int], replicas: int, budget: int) -> None:
    for micro in (m for replica in schedule(lengths, replicas, budget) for m in replica):
        assert sum(lengths[i] for i in micro) <= budget or len(micro) == 1


@given(lengths_of_sequences, replica_counts, budgets)
def test_no_micro_batch_is_empty_on_the_fullest_replica(lengths: list[int], replicas: int, budget: int) -> None:
    plan = schedule(lengths, replicas, budget)
    assert not lengths or any(all(replica) for replica in plan)


@given(lengths_of_sequences, replica_counts, budgets)
def test_loads_differ_by_at_most_one_longest_sequence(lengths: list[int], replicas: int, budget: int) -> None:
    loads = [sum(lengths[i] for micro in replica for i in micro) for replica in schedule(lengths, replicas, budget)]
    assert max(loads) - min(loads) <= max(lengths, default=0)


@given(lengths_of_sequences, replica_counts, budgets)
def test_the_same_lengths_give_the_same_plan(lengths: list[int], replicas: int, budget: int) -> None:
    assert schedule(list(lengths), replicas, budget) == schedule(lengths, replicas, budget)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=50), replica_counts)
def test_micro_batches_are_filled(lengths: list[int], replicas: int) -> None:
    """First fit: of any two micro-batches of a replica, the second's first sequence had no room in the first."""
    budget = max(lengths)
    for replica in schedule(lengths, replicas, budget):
        filled = [micro for micro in replica if micro]
        for earlier, later in pairwise(filled):
            assert sum(lengths[i] for i in earlier) + lengths[later[0]] > budget


def test_a_worked_example() -> None:
    assert schedule([5, 9, 1, 4, 4], replicas=2, budget=8) == [[[1], [4]], [[0, 2], [3]]]
