"""Whatever comes in whatever order: each sample is wanted until it is done, and groups are whole and in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.rollout.pool import Pool
from grpo_mega.types import Prompt, Sample


def prompt(name: str) -> Prompt:
    return Prompt(name, (1,), name, "", "")


def sample(prompt: Prompt, index: int, text: str = "") -> Sample:
    return Sample(prompt, index, (2,), (0.0,), "stop", ((0, 0),), text)


@given(st.integers(1, 3), st.lists(st.sampled_from("abc"), max_size=5), st.data())
def test_every_sample_is_waiting_in_flight_or_done(group_size: int, names: list[str], data: st.DataObject) -> None:
    """Prompts that are equal included; a model of three lists agrees after every call."""
    pool = Pool(group_size)
    waiting: list[tuple[str, int]] = []
    in_flight: list[tuple[str, int]] = []
    done: list[tuple[str, int]] = []
    complete: list[int] = []
    left = list(names)
    while left or waiting or in_flight:
        step = data.draw(st.sampled_from(["add", "begin", "take", "take", "take", "lose"]))
        if step == "add" and left:
            name = left.pop(0)
            pool.add([prompt(name)])
            waiting += [(name, index) for index in range(group_size)]
        elif step == "begin":
            pool.begin()
            in_flight, waiting = in_flight + waiting, []
        elif step == "take" and in_flight:
            taken = data.draw(st.lists(st.sampled_from(in_flight), min_size=1, max_size=2, unique=True))
            complete += pool.take([sample(prompt(name), index) for name, index in taken])
            for one in taken:
                in_flight.remove(one)
                done.append(one)
        elif step == "lose":
            pool.lose()
            in_flight, waiting = [], waiting + in_flight
        assert sorted((p.id, index) for p, index in pool.waiting) == sorted(waiting)
        assert (pool.in_flight, pool.done) == (len(in_flight), len(done))
        assert pool.complete == (not waiting and not in_flight)
    assert sorted(complete) == [*range(len(names))]
    groups = [pool.group(number) for number in range(len(names))]
    assert [[(s.prompt.id, s.index) for s in group] for group in groups] == [
        [(name, index) for index in range(group_size)] for name in names
    ]
    assert pool.samples() == [s for group in groups for s in group]


@given(st.permutations([(name, index) for name in "abcd" for index in range(3)]))
def test_what_comes_out_does_not_depend_on_the_order_in_which_samples_finish(order: list[tuple[str, int]]) -> None:
    pool = Pool(3, [prompt(name) for name in "abcd"])
    assert [(p.id, index) for p, index in pool.waiting] == [(name, index) for name in "abcd" for index in range(3)]
    pool.begin()
    assert sorted(number for one in order for number in pool.take([sample(prompt(one[0]), one[1])])) == [0, 1, 2, 3]
    assert pool.samples() == [sample(prompt(name), index) for name in "abcd" for index in range(3)]


def test_groups_that_one_call_completes_are_named_in_order() -> None:
    pool = Pool(1, [prompt(name) for name in "abc"])
    pool.begin()
    assert pool.take([sample(prompt(name), 0) for name in "ca"]) == [0, 2]


@pytest.mark.parametrize("stray", [("a", 2), ("b", 0), ("a", 0)])
def test_a_sample_that_is_not_in_flight_is_refused(stray: tuple[str, int]) -> None:
    """One that was never asked for, or has come before."""
    pool = Pool(2, [prompt("a")])
    with pytest.raises(ValueError, match="sample 1 of prompt 'a' is not in flight"):
        pool.take([sample(prompt("a"), 1)])
    pool.begin()
    pool.take([sample(prompt("a"), 0)])
    with pytest.raises(ValueError, match=f"sample {stray[1]} of prompt '{stray[0]}' is not in flight"):
        pool.take([sample(prompt(stray[0]), stray[1])])
