"""Each sample is wanted until it is done, and groups are whole and in order, whatever comes in whatever order."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import results, run_ranks

from grpo_mega.rollout.engine import Wanted
from grpo_mega.rollout.producer import Pool
from grpo_mega.types import Answer, Group, Prompt, Score


def prompt(name: str) -> Prompt:
    return Prompt(name, (1,), name, "", "")


def answer(length: int = 1) -> Answer:
    return Answer(length, "stop", ((0, 0),), Score(0.0, {}))


NUMBERS = st.integers(0, 999)


@given(st.integers(1, 3), st.lists(st.sampled_from("abc"), max_size=5), st.data())
def test_every_sample_is_waiting_in_flight_or_done(group_size: int, names: list[str], data: st.DataObject) -> None:
    """Prompts that are equal included; a model of three lists agrees after every call."""
    pool = Pool(group_size)
    waiting: list[tuple[str, int]] = []
    in_flight: list[tuple[str, int]] = []
    done: list[int] = []  # numbers, in this order
    left = list(names)
    while left or waiting or in_flight:
        possible = ["begin", "lose", *(["add"] * 2 if left else []), *(["take"] * 4 if in_flight else [])]
        step = possible[data.draw(NUMBERS) % len(possible)]
        if step == "add":
            name = left.pop(0)
            pool.add([prompt(name)])
            waiting += [(name, index) for index in range(group_size)]
        elif step == "begin":
            pool.begin()
            in_flight, waiting = in_flight + waiting, []
        elif step == "take":
            name, index = in_flight.pop(data.draw(NUMBERS) % len(in_flight))
            number = pool.take(name, index, answer(len(done)))
            assert (names[number // group_size], number % group_size) == (name, index)
            done.append(number)
        elif step == "lose":
            pool.lose()
            in_flight, waiting = [], waiting + in_flight
        assert sorted((one.prompt.id, one.index) for one in pool.waiting) == sorted(waiting)
        assert (pool.in_flight, pool.done) == (len(in_flight), len(done))
        assert pool.complete == (not waiting and not in_flight)
        for index, name in enumerate(names):
            numbers = range(index * group_size, (index + 1) * group_size)
            whole = all(number in done for number in numbers)
            answers = tuple(answer(done.index(number)) for number in numbers) if whole else ()
            assert pool.group(index) == (Group(prompt(name), answers) if whole else None)
    assert sorted(done) == [*range(len(names) * group_size)]
    assert pool.group(len(names)) is None


@given(st.permutations([(name, index) for name in "abcd" for index in range(3)]))
def test_what_comes_out_does_not_depend_on_the_order_in_which_samples_finish(order: list[tuple[str, int]]) -> None:
    pool = Pool(3, [prompt(name) for name in "abcd"])
    assert pool.waiting == [Wanted(prompt(name), index) for name in "abcd" for index in range(3)]
    pool.begin()
    numbers = {one: pool.take(*one, answer("abcd".index(one[0]) * 3 + one[1])) for one in order}
    assert sorted(numbers.values()) == [*range(12)]
    for group, name in enumerate("abcd"):
        assert pool.group(group) == Group(prompt(name), tuple(answer(group * 3 + index) for index in range(3)))


@pytest.mark.parametrize("stray", [("a", 2), ("b", 0), ("a", 0)])
def test_a_sample_that_is_not_in_flight_is_refused(stray: tuple[str, int]) -> None:
    """One that was never asked for, or has come before."""
    pool = Pool(2, [prompt("a")])
    with pytest.raises(ValueError, match="sample 1 of prompt 'a' is not in flight"):
        pool.take("a", 1, answer())
    pool.begin()
    pool.take("a", 0, answer())
    with pytest.raises(ValueError, match=f"sample {stray[1]} of prompt '{stray[0]}' is not in flight"):
        pool.take(*stray, answer())


def test_what_is_lost_is_wanted_again_prompt_by_prompt_before_what_came_later() -> None:
    first, second, third = map(prompt, "abc")
    pool = Pool(2, [first, second])
    pool.begin()
    pool.take(second.id, 0, answer())
    pool.add([third])
    pool.lose()
    assert pool.waiting == [Wanted(first, 0), Wanted(first, 1), Wanted(second, 1), Wanted(third, 0), Wanted(third, 1)]


JOB = Path(__file__).with_name("producer_job.py")
# By name: importing the job would prepare the platform here.
CHECKS = [
    node.name.removeprefix("check_")
    for node in ast.parse(JOB.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]

LAYOUTS = [
    pytest.param(("single", 1), id="alone"),
    pytest.param(("ep2", 2), id="ep2", marks=pytest.mark.long),
    pytest.param(("single", 2), id="replicas", marks=pytest.mark.long),
    pytest.param(("tp2", 2), id="tp2", marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=LAYOUTS)
def outcome(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, str]:
    layout, ranks = request.param
    return results(run_ranks(JOB, ranks, [str(tmp_path_factory.mktemp("producer")), f"layout={layout}"]))


@pytest.mark.parametrize("check", CHECKS)
def test_producer(outcome: dict[str, str], check: str) -> None:
    assert not outcome[check], outcome[check]
