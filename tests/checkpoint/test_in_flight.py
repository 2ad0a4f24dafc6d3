"""Samples in flight come back whole, each held by the one rank that all name, on any number of ranks."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import refused

from grpo_mega.checkpoint.in_flight import FILE, load, rank_file, save
from grpo_mega.checkpoint.integrity import seal
from grpo_mega.platform.manifest import MANIFEST
from grpo_mega.types import Call, GroupInFlight, Prompt, Sample, SampleInfo, Score, StreamState

SIZE = 3


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def rank_of(rank: int, ranks: int) -> SimpleNamespace:
    return SimpleNamespace(rank=rank, world_size=ranks, is_main=rank == 0)


def sample(prompt: Prompt, number: int, length: int, reason: str, text: str) -> Sample:
    ids, logprobs = array("i", range(length)), array("f", [-0.1 * k for k in range(length)])
    segments = ((0, 3), (2, 4)) if length > 2 else ((0, 3),)
    given, restarts = (((1, 2), (4, 6)), (4,)) if length > 6 else (((1, 2),) if length > 3 else (), ())
    calls = tuple(Call("1", error, reward, error) for error, reward in ((False, 0.25), (True, None)) if given)
    experts = torch.full((length + 1, 1, 2), number, dtype=torch.int16) if reason == "stop" and number % 5 else None
    columns = prompt, number % SIZE, ids, logprobs, reason, segments, text, experts
    return Sample(*columns, given=given, calls=calls, restarts=restarts, number=number)


groups = st.lists(
    st.lists(st.tuples(st.sampled_from("nuts"), st.integers(0, 9), st.text(max_size=5)), min_size=SIZE, max_size=SIZE),
    max_size=4,
)
"""Of each sample: not begun, unfinished (also "t", after a turn) or finished ("s" for stopped), tokens and text."""


def states(made: list[list[tuple[str, int, str]]], ranks: int) -> list[StreamState]:
    """What each rank has in flight."""
    held = [StreamState({}, submitted=17, slices=5) for _ in range(ranks)]
    for place, members in enumerate(made):
        number, prompt = 7 + 2 * place, Prompt(f"p{place}", (1, 2), "", "", "", {"tests": [1]}, "?")
        completed, seats = 5 if all(kind == "s" for kind, *_ in members) else 0, [*range(place, place + SIZE)]
        group = GroupInFlight(prompt, 4, [None] * SIZE, [None] * SIZE, seats, completed)
        for index, (kind, length, text) in enumerate(members):
            whole = sample(prompt, number * SIZE + index, length, {"u": "slice", "t": "turn"}.get(kind, "stop"), text)
            if kind in "ut":
                group.so_far[index] = whole
            if kind == "s":
                holder = (number + index) % ranks
                score = Score(0.5, {"a": 0.5}, steps=((0, 1.0),))
                known = length, "stop", whole.segments, score, holder
                group.infos[index] = SampleInfo(*known, given=whole.given, restarts=whole.restarts)
                held[holder].samples[number * SIZE + index] = whole
        for state in held:
            state.groups[number] = group
    return held


@settings(max_examples=40, deadline=None)
@given(groups, st.integers(1, 4), st.integers(1, 5))
@example([[("s", 4, "")] * SIZE], 2, 2)  # a complete group
def test_all_samples_come_back_on_any_number_of_ranks(tmp_path_factory, made, ranks: int, later: int) -> None:
    folder, before = tmp_path_factory.mktemp("checkpoint"), states(made, ranks)
    for rank in reversed(range(ranks)):
        save(folder, before[rank], rank_of(rank, ranks))
    seal(folder, {})
    after = [load(folder, rank_of(rank, later)) for rank in range(later)]
    if ranks == later:
        assert after == before
    everything = {number: s for state in before for number, s in state.samples.items()}
    assert sum(len(state.samples) for state in after) == len(everything)
    for rank, state in enumerate(after):
        assert (state.submitted, state.slices) == (17, 5)
        assert state.groups == after[0].groups
        for number, one in state.samples.items():
            assert one == everything[number]
            assert str(one.experts) == str(everything[number].experts)
            assert one.number == number
            assert state.groups[number // SIZE].infos[number % SIZE].holder == rank
        for number, group in state.groups.items():
            assert group.so_far == before[0].groups[number].so_far


def test_infos_of_samples_have_the_key_that_earlier_releases_read_and_wrote(tmp_path: Path) -> None:
    save(tmp_path, states([[("s", 4, "")] * SIZE], 1)[0], rank_of(0, 1))
    (group,) = json.loads((tmp_path / FILE).read_text())["groups"].values()
    assert len(group["answers"]) == SIZE


def test_samples_of_checkpoints_before_restarts_have_none(tmp_path: Path) -> None:
    (state,) = states([[("u", 4, ""), ("s", 5, ""), ("t", 2, "")]], 1)
    save(tmp_path, state, rank_of(0, 1))
    file = tmp_path / rank_file(0, 1)
    columns = torch.load(file)
    records = json.loads(columns["samples"])
    for record in records:
        assert record.pop("restarts") == []
    torch.save(columns | {"samples": json.dumps(records)}, file)
    seal(tmp_path, {})
    assert load(tmp_path, rank_of(0, 1)) == state


def test_a_checkpoint_of_a_run_without_slices_has_none(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text("{}")
    assert load(tmp_path, rank_of(0, 1)) is None


def test_a_checkpoint_that_lacks_a_rank_s_samples_is_refused(tmp_path: Path) -> None:
    save(tmp_path, StreamState(), rank_of(0, 2))
    seal(tmp_path, {})
    assert json.loads((tmp_path / FILE).read_text())["ranks"] == 2
    with refused(f"{tmp_path} | the checkpoint cannot be used: its manifest does not name {rank_file(1, 2)}"):
        load(tmp_path, rank_of(0, 2))
