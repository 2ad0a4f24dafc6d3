"""How samples are split into mini-batches, including those that are left out of the computation."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.algorithm.mini_batches import make_mini_batches

samples = st.lists(st.integers(0, 99), unique=True, max_size=40)
subsets = st.sets(st.integers(0, 99))
parts_wanted = st.integers(1, 50)
seeds = st.text(max_size=3)


@given(samples, subsets, parts_wanted, seeds)
def test_every_sample_is_in_one_mini_batch(counted: list[int], trained: set[int], parts: int, seed: str) -> None:
    mini_batches = make_mini_batches(counted, [i for i in counted if i in trained], parts, seed)
    dealt = [i for mini_batch in mini_batches for i in (*mini_batch.trained, *mini_batch.left_out)]
    assert len(dealt) == len(set(dealt))
    assert {i for mini_batch in mini_batches for i in mini_batch.trained} == set(counted) & trained
    assert not {i for mini_batch in mini_batches for i in mini_batch.left_out} & trained
    for mini_batch in mini_batches:
        assert mini_batch.trained == sorted(mini_batch.trained) != []
        assert len(counted) // parts <= len(mini_batch.trained) + len(mini_batch.left_out) <= -(-len(counted) // parts)


@given(samples, subsets, parts_wanted, seeds)
def test_mini_batches_do_not_depend_on_which_samples_are_trained(
    counted: list[int], trained: set[int], parts: int, seed: str
) -> None:
    all_trained = make_mini_batches(counted, counted, parts, seed)
    some_trained = make_mini_batches(counted, [i for i in counted if i in trained], parts, seed)
    assert [sorted(mini_batch.trained + mini_batch.left_out) for mini_batch in some_trained] == [
        mini_batch.trained for mini_batch in all_trained if set(mini_batch.trained) & trained
    ]


def test_another_seed_is_another_order() -> None:
    assert (
        make_mini_batches(range(20), range(20), 4, "0")
        == make_mini_batches(range(20), range(20), 4, "0")
        != make_mini_batches(range(20), range(20), 4, "1")
    )


def test_without_a_trained_sample_there_is_no_update() -> None:
    assert make_mini_batches(range(20), [], 4, "0") == []
    assert make_mini_batches([], [], 4, "0") == []
