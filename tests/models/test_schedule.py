"""The invariants that schedule.py states, for any lengths."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.models.schedule import CELLS, cells_per_token, deal, fill

lengths_of_sequences = st.lists(st.integers(1, 60), max_size=50)
replica_counts = st.integers(1, 9)
budgets = st.integers(1, 100)
cells_of_tables = st.integers(1, 5)
groups = st.lists(st.tuples(st.integers(0, 20), st.lists(st.integers(1, 30), min_size=1, max_size=8)), max_size=8)
"""Length of the prompt and of its completions, group by group."""


def schedule(lengths: list[int], replicas: int, budget: int) -> list[list[list[int]]]:
    """Sequences that share nothing, by replica and micro-batch."""
    return schedule_groups(lengths, list(range(len(lengths))), [0] * len(lengths), replicas, budget)


def schedule_groups(
    lengths: list[int],
    prompts: list[int],
    shared: list[int],
    replicas: int,
    budget: int,
    cells: int = CELLS,
    pieces: list[int] | None = None,
) -> list[list[list[int]]]:
    """Sequences by replica, each of which fills its micro-batches with what it got."""
    plan = []
    for share in deal(lengths, prompts, shared, replicas, budget, cells, pieces):
        columns = ([values[i] for i in share] for values in (lengths, prompts, shared))
        rows = pieces and [pieces[i] for i in share]
        plan.append([[share[i] for i in micro] for micro in fill(*columns, budget, cells, rows)])
    return plan


@given(lengths_of_sequences, replica_counts, budgets)
def test_every_sequence_is_placed_exactly_once(lengths: list[int], replicas: int, budget: int) -> None:
    plan = schedule(lengths, replicas, budget)
    assert len(plan) == replicas
    assert sorted(i for replica in plan for micro in replica for i in micro) == list(range(len(lengths)))


@given(lengths_of_sequences, replica_counts, budgets)
def test_only_a_longer_sequence_alone_exceeds_the_budget(lengths: list[int], replicas: int, budget: int) -> None:
    for micro in (m for replica in schedule(lengths, replicas, budget) for m in replica):
        assert sum(lengths[i] for i in micro) <= budget or len(micro) == 1


@given(lengths_of_sequences, replica_counts, budgets)
def test_no_micro_batch_is_empty(lengths: list[int], replicas: int, budget: int) -> None:
    assert all(micro for replica in schedule(lengths, replicas, budget) for micro in replica)


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
            together = [*earlier, later[0]]
            cells = len(together) * max(lengths[i] for i in together)
            assert sum(lengths[i] for i in together) > budget or cells > CELLS * budget


def test_a_worked_example() -> None:
    assert schedule([5, 9, 1, 4, 4], replicas=2, budget=8) == [[[1], [4]], [[0, 2], [3]]]


@given(groups, replica_counts, budgets, cells_of_tables)
def test_groups_keep_the_budget_with_each_prompt_counted_once(
    groups: list[tuple[int, list[int]]], replicas: int, budget: int, cells: int
) -> None:
    members = [(group, prompt, n) for group, (prompt, completions) in enumerate(groups) for n in completions]
    numbers, prompts, lengths = [g for g, _, _ in members], [p for _, p, _ in members], [p + n for _, p, n in members]
    plan = schedule_groups(lengths, numbers, prompts, replicas, budget, cells=cells)
    assert sorted(i for replica in plan for micro in replica for i in micro) == list(range(len(members)))
    for micro in (m for replica in plan for m in replica):
        shared = {members[i][:2] for i in micro}
        tokens = sum(prompt for _, prompt in shared) + sum(members[i][2] for i in micro)
        table = len(micro) * max((lengths[i] for i in micro), default=0)
        assert (tokens <= budget and table <= cells * budget) or len(micro) == 1


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 5)), max_size=50), replica_counts, budgets)
def test_tables_have_room_for_the_pieces_of_sequences(
    sequences: list[tuple[int, int]], replicas: int, budget: int
) -> None:
    lengths, pieces = [length for length, _ in sequences], [count for _, count in sequences]
    numbers = list(range(len(lengths)))
    plan = schedule_groups(lengths, numbers, [0] * len(lengths), replicas, budget, pieces=pieces)
    assert sorted(i for replica in plan for micro in replica for i in micro) == numbers
    for micro in (m for replica in plan for m in replica):
        table = sum(pieces[i] for i in micro) * max(lengths[i] for i in micro)
        assert table <= CELLS * budget or len(micro) == 1


def test_a_group_stays_together() -> None:
    plan = schedule_groups([12, 14, 13, 11], [0, 1, 0, 1], [10] * 4, replicas=2, budget=20)
    assert plan == [[[1, 3]], [[2, 0]]]


def test_a_long_prompt_does_not_make_the_table_large() -> None:
    plan = schedule_groups([8100] * 64, [0] * 64, [8000] * 64, replicas=1, budget=16384)
    assert [len(micro) for micro in plan[0]] == [8] * 8


@given(st.integers(1, 4), st.integers(2, 8), st.integers(1, 3))
def test_a_few_groups_give_work_to_every_replica(groups: int, replicas: int, per_replica: int) -> None:
    size = replicas * per_replica
    numbers = [group for group in range(groups) for _ in range(size)]
    plan = schedule_groups([100] * len(numbers), numbers, [10] * len(numbers), replicas, budget=16384)
    counts = [sum(map(len, replica)) for replica in plan]
    assert max(counts) - min(counts) <= 2 * max(1, len(numbers) // replicas // 2)
    assert min(counts) > 0


def test_tables_with_masks_are_no_larger_than_the_budget() -> None:
    """One sequence of 8 and eight of 1: as 9 x 8 cells without masks, or apart with them."""
    assert (cells_per_token(1), cells_per_token(2), cells_per_token(4)) == (CELLS, 1, 1)
    lengths, alone = [8, *[1] * 8], [0] * 9
    for cells, sizes in ((CELLS, [8, 1]), (1, [2, 7])):
        plan = schedule_groups(lengths, list(range(9)), alone, 1, budget=16, cells=cells)
        assert [len(micro) for micro in plan[0]] == sizes
