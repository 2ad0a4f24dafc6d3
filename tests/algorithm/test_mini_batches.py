"""How samples are dealt out to mini-batches, those that are left out of the computation among them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.algorithm.mini_batches import deal

samples = st.lists(st.integers(0, 99), unique=True, max_size=40)
subsets = st.sets(st.integers(0, 99))
parts_wanted = st.integers(1, 50)
seeds = st.text(max_size=3)


@given(samples, subsets, parts_wanted, seeds)
def test_every_sample_is_in_one_mini_batch(counted: list[int], trained: set[int], parts: int, seed: str) -> None:
    shares = deal(counted, [i for i in counted if i in trained], parts, seed)
    dealt = [i for share in shares for i in (*share.trained, *share.left_out)]
    assert len(dealt) == len(set(dealt))
    assert {i for share in shares for i in share.trained} == set(counted) & trained
    assert not {i for share in shares for i in share.left_out} & trained
    for share in shares:
        assert share.trained == sorted(share.trained) != []
        assert len(counted) // parts <= len(share.trained) + len(share.left_out) <= -(-len(counted) // parts)


@given(samples, subsets, parts_wanted, seeds)
def test_mini_batches_do_not_depend_on_who_is_computed(
    counted: list[int], trained: set[int], parts: int, seed: str
) -> None:
    everyone = deal(counted, counted, parts, seed)
    some = deal(counted, [i for i in counted if i in trained], parts, seed)
    assert [sorted(share.trained + share.left_out) for share in some] == [
        share.trained for share in everyone if set(share.trained) & trained
    ]


def test_another_seed_is_another_order() -> None:
    assert (
        deal(range(20), range(20), 4, "0") == deal(range(20), range(20), 4, "0") != deal(range(20), range(20), 4, "1")
    )


def test_nobody_computed_is_no_update() -> None:
    assert deal(range(20), [], 4, "0") == []
    assert deal([], [], 4, "0") == []
