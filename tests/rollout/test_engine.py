"""How finished samples are distributed over ranks; samples that go on."""

from __future__ import annotations

from array import array
from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.rollout.engine import Places, Wanted, round_robin
from grpo_mega.types import Prompt, Sample


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


@given(st.integers(1, 5), st.lists(st.lists(st.integers(1, 4), max_size=8), max_size=4))
def test_engines_get_equally_many_samples_although_some_go_on_where_they_began(
    engines: int, slices: list[list[int]]
) -> None:
    """In each slice some samples go on, the fewest of them on the last engines, and groups are added."""
    places, of_sample, number = Places(engines), dict[int, int](), 0
    for added in slices:
        places.begin()
        held = Counter(dict.fromkeys(range(engines), 0))
        for sample, engine in [*of_sample.items()]:
            if sample % (engine + 1) == 0:
                held[engine] += 1
                assert places.place([wanted(sample, so_far=going_on(None, [5], 3))]) == engine
        for size in added:
            before = min(held.values())
            engine = places.place([wanted(number + index) for index in range(size)])
            assert held[engine] == before
            held[engine] += size
            of_sample |= dict.fromkeys(range(number, number + size), engine)
            number += size


def wanted(number: int, so_far: Sample | None = None) -> Wanted:
    return Wanted(Prompt("p", (1,), "", "", ""), number, so_far, number=number)


def going_on(sample: Sample | None, tokens: list[int], version: int) -> Sample:
    """The sample with further tokens."""
    ids, logprobs = array("i", tokens), array("f", [-1.0] * len(tokens))
    return Wanted(Prompt("p", (1,), "", "", ""), 0, sample).sample(ids, logprobs, "abort", version, str)


def test_a_sample_that_was_ended_before_its_next_token_has_none_of_that_version() -> None:
    sample = going_on(None, [5, 6], 3)
    assert going_on(sample, [], 4).segments == ((0, 3),)
    assert going_on(sample, [7], 4).segments == ((0, 3), (2, 4))


@given(st.integers(1, 4), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 3))
def test_an_engine_reads_only_the_last_piece_of_a_sample(prompt: int, pieces: list[int], new: int) -> None:
    """Limits count all pieces; experts of what the engine has not read are unknown."""
    size = sum(pieces)
    restarts = tuple(sum(pieces[:number]) for number in range(1, len(pieces)))
    ids, logprobs = array("i", range(size)), array("f", [0.0] * size)
    given = tuple((first, first + 1) for first in restarts)
    asked = Prompt("p", (99,) * prompt, "", "", "")
    before = Sample(asked, 0, ids, logprobs, "turn", ((0, 3),), "", given=given, restarts=restarts)
    one = Wanted(asked, 0, before, number=5)
    assert one.prefix == ([*range(restarts[-1], size)] if restarts else [99] * prompt + [*ids])
    assert one.limits(1000, 100) == (100 - prompt - size,) * 2
    assert one.limits(30, 100) == (30 - before.sampled,) * 2
    read = torch.ones(len(one.prefix) + new - 1, 2, 3, dtype=torch.int16)
    after = one.sample(array("i", [7] * new), array("f", [-1.0] * new), "stop", 3, str, read)
    assert after.restarts == restarts
    assert after.experts is not None
    assert after.experts.shape == (prompt + size + new - 1, 2, 3)
    unread = prompt + restarts[-1] if restarts else 0
    assert (after.experts[:unread] == -1).all()
    assert (after.experts[unread:] == 1).all()
