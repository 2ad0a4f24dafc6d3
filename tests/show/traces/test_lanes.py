"""Lanes: known traces give known phases, one after the other, and the memory beside them."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.show.traces.lanes import MOST_POINTS, MOST_SPANS, lanes
from grpo_mega.show.traces.trace_files import RankTrace

Events = list[dict[str, Any]]


def edges(*of: tuple[str, str, float]) -> Events:
    """Phases' edges, of the kind, name and second of each."""
    return [{"ph": kind, "name": name, "ts": 1e6 * at, "tid": 0} for kind, name, at in of]


def step(number: int, begin: float, end: float, *inside: dict[str, Any]) -> Events:
    first, last = edges(("B", "step", begin), ("E", "step", end))
    return [first | {"args": {"step": number, "stage": "grpo"}}, *inside, last]


GENERATION = edges(
    ("B", "sync", 100.0), ("E", "sync", 101.0), ("B", "generate", 101.0), ("B", "reward", 104.0),
    ("E", "reward", 104.5), ("E", "generate", 106.0), ("B", "update", 107.0), ("E", "update", 110.0),
)  # fmt: skip


def test_phases_follow_each_other_and_one_that_is_interrupted_goes_on() -> None:
    memory = {"ph": "C", "name": "memory", "ts": 101e6, "args": {"resident GB": 9.0, "reserved GB": 60.0}}
    found = lanes([RankTrace(3, step(7, 100.0, 110.0, *GENERATION, memory))], range(6, 8))
    assert found is not None
    assert (found.steps, found.seconds) == ([(7, 0.0, 10.0)], 10.0)
    (lane,) = found.lanes
    assert (lane.rank, lane.left_out) == (3, 0)
    assert lane.spans == [
        (0.0, 1.0, "sync"), (1.0, 4.0, "generate"), (4.0, 4.5, "reward"), (4.5, 6.0, "generate"), (7.0, 10.0, "update"),
    ]  # fmt: skip
    assert lane.memory == [(1.0, 60.0)], "of the device, where there is one"


def test_what_an_engine_holds_is_a_curve_of_its_own() -> None:
    held = [{"ph": "C", "name": "device", "ts": at, "args": {"trainer GB": 5.0, "engine GB": gb}} for at, gb in
            ((101e6, 0.5), (106e6, 60.0))]  # fmt: skip
    found = lanes([RankTrace(3, step(7, 100.0, 110.0, *GENERATION, *held))], range(6, 8))
    assert found is not None
    assert found.lanes[0].engine_memory == [(1.0, 0.5), (6.0, 60.0)]
    assert found.lanes[0].memory == []


def test_ranks_share_a_clock() -> None:
    early, late = (
        RankTrace(rank, step(7, at, at + 2, *edges(("B", "update", at), ("E", "update", at + 1))))
        for rank, at in ((0, 100.0), (1, 103.0))
    )
    found = lanes([early, late], range(7, 8))
    assert found is not None
    assert found.seconds == 5.0
    assert [lane.spans for lane in found.lanes] == [[(0.0, 1.0, "update")], [(3.0, 4.0, "update")]]


def test_steps_that_no_trace_has_have_no_lanes() -> None:
    assert lanes([], range(9)) is None
    assert lanes([RankTrace(0, step(7, 100.0, 110.0, *GENERATION))], range(8, 20)) is None
    assert lanes([RankTrace(0, step(7, 100.0, 100.0))], range(9)) is None


def test_of_very_many_phases_the_shortest_are_left_out_and_counted() -> None:
    kinds = [(f"p{n % 3}", 0.001 if n % 2 else 0.01) for n in range(4 * MOST_SPANS)]
    inside, at = [], 100.0
    for name, lasts in kinds:
        memory = {"ph": "C", "name": "memory", "ts": 1e6 * at, "args": {"resident GB": at}}
        inside += [*edges(("B", name, at), ("E", name, at + lasts)), memory]
        at += lasts
    found = lanes([RankTrace(0, step(1, 100.0, at, *inside))], range(2))
    assert found is not None
    (lane,) = found.lanes
    assert (len(lane.spans), lane.left_out) == (MOST_SPANS, 3 * MOST_SPANS)
    assert all(abs(end - begin - 0.01) < 1e-6 for begin, end, _ in lane.spans)
    assert len(lane.memory) <= MOST_POINTS
    assert max(held for _, held in lane.memory) == inside[-1]["args"]["resident GB"], "the most of each stretch"


NAMES = st.sampled_from(["update", "generate", "reward", "memory"])
EVENTS = st.fixed_dictionaries(
    {"ph": st.sampled_from("BECX"), "name": NAMES, "ts": st.floats(0, 1e3)},
    optional={"tid": st.integers(0, 1), "args": st.just({"step": 1, "stage": "grpo", "resident GB": "much"})},
)


@given(st.lists(EVENTS, max_size=30))
def test_whatever_phases_a_damaged_trace_has_they_are_inside_of_its_steps(events: Events) -> None:
    events = sorted(events, key=lambda event: event["ts"])
    found = lanes([RankTrace(0, step(1, 0.0, 1e-3, *events))], range(5))
    if found is None:
        return
    for begin, end, _ in found.lanes[0].spans:
        assert 0 <= begin <= end <= found.seconds + 1e-9
