"""The prompt stream: how it is cut changes nothing, a saved cursor continues it, foreign state is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mega.data.prompt_order import PromptSource, mixed_epochs, mixture, shares, shuffled_draws
from grpo_mega.types import Prompt


def prompts(n: int) -> list[Prompt]:
    return [Prompt(id=f"p{i}", token_ids=(1, i), text=str(i), answer=str(i), task="t") for i in range(n)]


def source(n: int = 5, seed: int = 0) -> PromptSource:
    order = mixed_epochs([prompts(n)], [shuffled_draws(n, seed)], mixture(shares([1])))
    return PromptSource(order, f"n={n} seed={seed}")


@settings(max_examples=50)
@given(st.integers(1, 7), st.integers(0, 9), st.lists(st.integers(0, 9), max_size=6))
def test_cuts_do_not_change_the_order(n: int, seed: int, cuts: list[int]):
    whole = source(n, seed).take(sum(cuts))
    parts = source(n, seed)
    assert [p for cut in cuts for p in parts.take(cut)] == whole
    assert parts.cursor == sum(cuts)


@settings(max_examples=50)
@given(st.integers(1, 7), st.integers(0, 20), st.integers(0, 20))
def test_resume_continues(n: int, before: int, after: int):
    first, second = source(n), source(n)
    first.take(before)
    second.load_state_dict(first.state_dict())
    assert second.take(after) == first.take(after)


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(0, 9))
def test_every_epoch_is_a_permutation(n: int, seed: int):
    stream = source(n, seed)
    for _ in range(3):
        assert sorted(p.text for p in stream.take(n)) == sorted(p.text for p in prompts(n))


def test_epochs_and_seeds_differ():
    stream = source(50)
    first, second = ([p.text for p in stream.take(50)] for _ in range(2))
    assert first != second
    assert first != [p.text for p in source(50, seed=1).take(50)]


def test_a_prompt_that_comes_back_has_a_new_id():
    taken = source(3).take(12)
    assert len({p.id for p in taken}) == 12


@pytest.mark.parametrize("cursor", [-1, None, "3", 2.5])
def test_damaged_state(cursor: object):
    with pytest.raises(ValueError, match="cursor"):
        source().load_state_dict({**source().state_dict(), "cursor": cursor})


def test_state_of_other_data():
    with pytest.raises(ValueError, match=r"n=4 seed=0.*n=5 seed=0"):
        source(5).load_state_dict(source(4).state_dict())


def test_negative_take():
    with pytest.raises(ValueError, match="-1"):
        source().take(-1)


def test_no_prompts():
    with pytest.raises(ValueError, match="no prompts"):
        source(0)
