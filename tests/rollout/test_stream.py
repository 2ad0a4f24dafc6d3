"""Streams whose samples outlive steps: what steps take does not depend on what happens in between, and nothing is lost.

The engine here is made: it has no model, but lengths that a test gives, and hands samples out in any order. With real
engines the stream is tested by stream_job.py.
"""

from __future__ import annotations

import ast
import random
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import results, run_ranks

from grpo_mega.checkpoint import in_flight
from grpo_mega.checkpoint.integrity import seal
from grpo_mega.platform.clock import own_clock
from grpo_mega.platform.stop import Interrupted
from grpo_mega.platform.trace import Process, Trace, recording
from grpo_mega.rollout.contract import EngineRestarted
from grpo_mega.rollout.engine import SLICE, TURN, Finished, SamplingParams, Wanted
from grpo_mega.rollout.stream import Slices, Stream
from grpo_mega.show.traces.trace_files import read_traces
from grpo_mega.types import Group, Prompt, Rollout, Sample, Score, StreamState, given_tokens, sampled_spans

SIZE = 2
"""Samples of a group."""
LONGEST = 12
STEPS = 6
HOW = SamplingParams(LONGEST, (0,))
ALONE = SimpleNamespace(rank=0, world_size=1, is_main=True)


class Killed(Exception):
    """Ends everything that is not in a checkpoint."""


class MadeEngine:
    """Samples of given lengths, a few of which each poll hands out."""

    def __init__(self, length: Callable[[str, int], int], order: random.Random) -> None:
        self.length, self.order = length, order
        self.under_way: list[tuple[Wanted, int]] = []
        self.generates_between_polls = order.random() < 0.5
        self.events: list[type[Exception]] = []
        self.turn = 0  # tokens of a turn, after which the sample stops for a reply; 0 for one turn

    @property
    def busy(self) -> bool:
        return bool(self.under_way)

    def submit(self, wanted: Sequence[Wanted], sampling: SamplingParams, version: int) -> None:
        self.under_way += [(one, version) for one in wanted]

    def poll(self, interrupted: bool = False) -> Finished:
        if self.events and self.order.random() < 0.2:
            self.under_way = []
            raise self.events.pop()("now")
        self.order.shuffle(self.under_way)
        count = self.order.randint(0, len(self.under_way))
        ended, self.under_way = self.under_way[:count], self.under_way[count:]
        return Finished([self.sample(*one) for one in ended], count)

    def sample(self, one: Wanted, version: int) -> Sample:
        now, left = one.limits(LONGEST, 10**6)
        done = len(one.so_far.token_ids) if one.so_far else 0
        sampled = done - given_tokens(one.so_far.given) if one.so_far else 0
        rest = self.length(one.prompt.id, one.index) - sampled
        if self.turn:
            rest = min(rest, self.turn - sampled % self.turn)
        more = min(now, rest)
        reason = "stop" if more == rest else "length" if more == left else SLICE
        tokens = array("i", [token(one, position) for position in range(done, done + more)])
        # Experts that tell with which version a token was read last.
        experts = torch.full((len(one.prefix) + more - 1, 1, 1), version, dtype=torch.int16)
        logprobs = array("f", [-version] * more)
        return one.sample(tokens, logprobs, reason, version, lambda ids: " ".join(map(str, ids)), experts)


class Replies:
    """Replies to every sample that stopped before its length with two tokens, to some of them late. Some replies take
    the place of all that came before."""

    def __init__(self, engine: MadeEngine) -> None:
        self.engine, self.pending = engine, list[Sample]()

    def go_on(self, samples: Sequence[Sample], longest: int, wait: float | None) -> list[Sample]:
        assert longest == LONGEST
        calls = {s.number for s in samples if s.finish_reason == "stop" and len(sampled_of(s)) < self.whole(s)}
        self.pending += [sample for sample in samples if sample.number in calls]
        self.engine.order.shuffle(self.pending)
        replied = len(self.pending) if wait is None else self.engine.order.randint(0, len(self.pending))
        now, self.pending = self.pending[:replied], self.pending[replied:]
        return [sample for sample in samples if sample.number not in calls] + [self.replied(one) for one in now]

    def whole(self, sample: Sample) -> int:
        return min(LONGEST, self.engine.length(sample.prompt.id, sample.index))

    def replied(self, sample: Sample) -> Sample:
        size, zeros = len(sample.token_ids), array("f", [0.0, 0.0])
        tokens, given = sample.token_ids + array("i", [7, 7]), (*sample.given, (size, size + 2))
        logprobs = sample.logprobs + zeros
        restarts = (*sample.restarts, size) if size % 2 else sample.restarts
        columns = {"token_ids": tokens, "logprobs": logprobs, "given": given, "restarts": restarts}
        return replace(sample, **columns, finish_reason=TURN)

    def forget(self) -> None:
        self.pending = []


def sampled_of(sample: Sample) -> list[int]:
    """Positions of the sampled tokens."""
    return [at for first, end in sampled_spans(len(sample.token_ids), sample.given) for at in range(first, end)]


def token(one: Wanted, position: int) -> int:
    return hash((int(one.prompt.id), one.index, one.draw, position)) % 1000


def score(samples: Sequence[Sample]) -> list[Score]:
    return [Score(float(len(s.token_ids) % 2), {}) for s in samples]


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def with_restarts(work: Callable[[], Any]) -> Any:
    while True:
        try:
            return work()
        except EngineRestarted:
            continue


class Trained:
    """Steps that take their groups from a stream, some of which are saved; version n has done n steps."""

    def __init__(
        self, slices: Slices, lengths: list[int], seed: int, events: list[type[Exception]], refill: bool, turn: int = 0
    ) -> None:
        self.slices, self.refill, self.order = slices, refill, random.Random(seed)
        self.engine = MadeEngine(lambda name, index: lengths[(int(name) * SIZE + index) % len(lengths)], self.order)
        self.engine.events, self.engine.turn = events, turn
        self.rollouts: list[Rollout] = []
        self.drawn = 0
        self.state = StreamState()
        self.version_of_slice: dict[int, int] = {}  # number of a slice -> version
        self.added: dict[str, tuple[int, list[int]]] = {}  # prompt id -> number of the next slice, seats

    def take(self, count: int) -> list[Prompt]:
        assert count >= 0
        self.drawn += count
        return [Prompt(str(n), (1,), "", "", "") for n in range(self.drawn - count, self.drawn)]

    def enough(self, groups: list[Group]) -> int | None:
        wanted = self.slices.per_step
        if not self.refill:
            return wanted if len(groups) >= wanted else None
        counts = range(wanted, min(len(groups), 2 * wanted) + 1)
        signal = [len(set(group.rewards)) > 1 for group in groups]
        return next((n for n in counts if n == 2 * wanted or sum(signal[:n]) >= wanted), None)

    def step(self) -> None:
        version = len(self.rollouts)
        replies = Replies(self.engine) if self.engine.turn else None
        stream = Stream(self.engine, score, SIZE, self.order.randint(1, 5), replying=replies)
        stream.load_state_dict(self.state)

        def advance(wait: bool = True) -> None:
            number = stream.state_dict().slices + 1 if not stream.in_slice else max(self.version_of_slice)
            self.version_of_slice[number] = version
            for group in [] if stream.in_slice else stream.state_dict().groups.values():
                self.added.setdefault(group.prompt.id, (number, group.seats))
            stream.advance(HOW, version, self.slices.tokens, wait=wait)

        rollout = with_restarts(lambda: stream.step(self.slices, self.take, self.enough, advance))
        if self.slices.ahead:
            stream.fill(self.slices, self.take, self.enough)
            with_restarts(lambda: advance(wait=False))
            assert stream.in_slice == self.engine.generates_between_polls
            if stream.in_slice:
                with_restarts(advance)
        self.state = stream.state_dict()
        kept = [one.experts for group in self.state.groups.values() for one in group.so_far if one]
        assert kept == [None] * len(kept), "every rank has these samples, and the next slice chooses their experts anew"
        self.rollouts.append(rollout)

    def run(self, folder: Path) -> list[Rollout]:
        saved = 0
        self.save(folder / "0")
        while len(self.rollouts) < STEPS:
            drawn, state = self.drawn, self.state
            try:
                self.step()
            except Interrupted:  # as if the step had not begun
                self.drawn, self.state = drawn, state
            except Killed:  # goes on from the newest checkpoint
                self.engine.under_way = []
                self.load(folder / str(saved), saved)
            else:
                self.evaluate()
                if self.order.random() < 0.5:
                    saved = len(self.rollouts)
                    self.save(folder / str(saved))
        return self.rollouts

    def evaluate(self) -> None:
        """Uses the engine between two steps, and leaves what is in flight alone."""
        events, self.engine.events = self.engine.events, []
        turn, self.engine.turn = self.engine.turn, 0
        stream = Stream(self.engine, score, SIZE)
        stream.add([Prompt("7", (1,), "", "", "")])
        stream.advance(HOW, len(self.rollouts))
        assert len(stream.take().samples) == SIZE
        self.engine.events, self.engine.turn = events, turn

    def save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        in_flight.save(folder, self.state, ALONE)
        seal(folder, {})
        self.positions = {**getattr(self, "positions", {}), folder.name: self.drawn}

    def load(self, folder: Path, steps: int) -> None:
        self.state = in_flight.load(folder, ALONE)
        self.rollouts, self.drawn = self.rollouts[:steps], self.positions[folder.name]


slices = st.builds(
    lambda tokens, per_step, more, order, ahead, reserve: Slices(
        tokens, per_step + more, order, per_step, ahead, reserve
    ),
    st.integers(1, LONGEST + 2),
    st.integers(1, 3),
    st.integers(0, 4),
    st.sampled_from(["finished", "submitted"]),
    st.booleans(),
    st.sampled_from([0, 0, 1, 4, 9]),
)
events = st.lists(st.sampled_from([Interrupted, EngineRestarted, Killed]), max_size=6)


@settings(max_examples=80, deadline=None)
@given(
    slices,
    st.lists(st.integers(1, LONGEST + 3), min_size=1, max_size=15),
    st.integers(0, 999),
    events,
    st.booleans(),
    st.sampled_from([0, 0, 3]),
)
def test_what_steps_take_does_not_depend_on_what_happens(slices, lengths, seed, events, refill, turn) -> None:
    """Interrupted, killed, without an engine, with an evaluation in between, in whatever order samples come: the same
    groups with the same tokens. No sample is lost or comes twice, none is older than the bound, and each token is of
    the version that its position tells."""
    with tempfile.TemporaryDirectory() as folder:
        disturbed = Trained(slices, lengths, seed, events, refill, turn)
        rollouts = disturbed.run(Path(folder))
    quiet = Trained(slices, lengths, seed + 1, [], refill, turn)
    for _ in range(STEPS):
        quiet.step()
    assert rollouts == quiet.rollouts
    assert disturbed.state == quiet.state
    taken = [group.prompt.id for rollout in rollouts for group in rollout.groups]
    waiting = [group.prompt.id for group in quiet.state.groups.values()]
    assert sorted(map(int, taken + waiting)) == [*range(quiet.drawn)]

    starts = starts_of(quiet, lengths)

    def completed(number: str) -> int:
        ends = [starts[int(number), index] + length_of(int(number), index, lengths) for index in range(SIZE)]
        return -(-max(ends) // slices.tokens)

    order = {"submitted": int, "finished": lambda number: (completed(number), int(number))}[slices.order]
    assert taken == sorted(taken, key=order)
    for step, rollout in enumerate(rollouts):
        assert quiet.enough(rollout.groups) == len(rollout.groups), "no more and no fewer"
        for number, group in enumerate(rollout.groups):
            for index in range(SIZE):
                start = starts[int(group.prompt.id), index]
                sample = rollout.samples[number * SIZE + index]
                check(sample, step, quiet, lengths, start)
                newest = -int(sample.logprobs[-1])
                unread = len(sample.prompt.token_ids) + sample.restarts[-1] if sample.restarts else 0
                routed = [-1] * unread + [newest] * (len(sample.token_ids) - unread)
                assert sample.experts.flatten().tolist() == routed, "those of the last slice"
                assert group.infos[index].restarts == sample.restarts
            assert group.infos[0].length == len(rollout.samples[number * SIZE].token_ids)
            assert group.infos[0].sampled == len(sampled_of(rollout.samples[number * SIZE]))


def length_of(number: int, index: int, lengths: list[int]) -> int:
    return min(lengths[(number * SIZE + index) % len(lengths)], LONGEST)


def starts_of(run: Trained, lengths: list[int]) -> dict[tuple[int, int], int]:
    """(problem, index) of each sample -> tokens that its seat could have sampled since the run began, before it.

    A seat goes on from one sample to the next without a pause, but none begins before it was added."""
    free: dict[object, int] = {}
    starts: dict[tuple[int, int], int] = {}
    for number in range(len(run.added)):
        first, seats = run.added[str(number)]
        for index in range(SIZE):
            seat = seats[index] if seats else (number, index)
            starts[number, index] = max(free.get(seat, 0), (first - 1) * run.slices.tokens)
            free[seat] = starts[number, index] + length_of(number, index, lengths)
    return starts


def check(sample: Sample, step: int, run: Trained, lengths: list[int], start: int) -> None:
    number, slices = int(sample.prompt.id), run.slices
    length = length_of(number, sample.index, lengths)
    one = Wanted(sample.prompt, sample.index, draw=number // slices.per_step)
    positions = sampled_of(sample)
    assert [sample.token_ids[at] for at in positions] == [token(one, at) for at in positions]
    versions = [run.version_of_slice[1 + (start + sampled) // slices.tokens] for sampled in range(length)]
    assert [sample.logprobs[at] for at in positions] == [-version for version in versions]
    assert [version for _, version in sample.segments] == [version for version, _ in groupby(versions)]
    assert versions == [[v for first, v in sample.segments if first <= at][-1] for at in positions]
    assert step - versions[0] <= slices.most_steps_late(LONGEST, run.refill)


@settings(max_examples=50, deadline=None)
@given(slices, st.lists(st.integers(1, LONGEST + 3), min_size=1, max_size=15), st.booleans())
def test_a_slice_ahead_changes_no_group_but_the_version_of_its_tokens(slices, lengths, refill) -> None:
    """The same groups in the same steps; the tokens of a slice that was generated ahead are one version older."""
    ahead, behind = (Trained(replace(slices, ahead=one), lengths, 0, [], refill) for one in (True, False))
    for _ in range(STEPS):
        ahead.step()
        behind.step()
    of_both = [[[group.prompt.id for group in r.groups] for r in run.rollouts] for run in (ahead, behind)]
    assert of_both[0] == of_both[1]
    for early, late in zip(ahead.rollouts, behind.rollouts, strict=True):
        for number, sample in late.samples.items():
            assert early.samples[number].token_ids == sample.token_ids
    later = {ahead.version_of_slice[number] - version for number, version in behind.version_of_slice.items()}
    assert later <= {0, -1}
    assert -1 in later


def test_later_slices_leave_a_state_alone() -> None:
    """A run that is stopped in a slice which is generated ahead saves the state from before."""
    made = Trained(Slices(4, 2, "finished", 2), [3, 11, 5], 0, [], refill=False)
    stream = Stream(made.engine, score, SIZE)
    stream.add(made.take(2))
    states = []
    while stream.unfinished:
        states.append((stream.state_dict(), deepcopy(stream.state_dict())))
        stream.advance(HOW, 0, 4)
    assert len(states) == 3
    assert all(state == before for state, before in states)


def test_a_whole_completion_in_a_slice_is_a_run_without_slices() -> None:
    lengths = [3, 11, 1, 7, 5]
    plain = Trained(Slices(None, 3, "finished", 3), lengths, 0, [], refill=False)
    sliced = Trained(Slices(LONGEST, 3, "finished", 3), lengths, 1, [], refill=False)
    for _ in range(STEPS):
        plain.step()
        sliced.step()
    assert not sliced.state.groups
    # The noise of a plain step is that of its sampling parameters, which are the same here in all steps.
    of_both = [
        [(g.prompt.id, [a.length for a in g.infos]) for r in run.rollouts for g in r.groups] for run in (plain, sliced)
    ]
    assert of_both[0] == of_both[1]


def test_samples_of_a_reserve_begin_where_others_have_ended() -> None:
    """Two seats, slices of 4 tokens: the samples of the first seat have 3, 6 and 5 tokens, those of the second 3, 2 and
    5. Step n samples with version n, and takes group n; group 1 needs two slices of step 1."""
    made = Trained(Slices(4, 1, "submitted", 1, reserve=1), [3, 3, 6, 2, 5, 5], 0, [], refill=False)
    for _ in range(3):
        made.step()
    segments = [[rollout.samples[index].segments for index in range(SIZE)] for rollout in made.rollouts]
    assert segments == [[((0, 0),), ((0, 0),)], [((0, 0), (1, 1)), ((0, 0), (1, 1))], [((0, 1), (3, 2)), ((0, 1),)]]


@pytest.mark.parametrize(("reserve", "slices"), [(0, 3), (1, 6), (2, 6), (3, 9)])
def test_the_bound_allows_for_all_samples_of_a_seat(reserve: int, slices: int) -> None:
    """Of 12 tokens each, in slices of 4: with up to 2 further groups, a seat of 2 groups has 2 samples, then 3."""
    groups = 2 + reserve
    assert Slices(4, 2, "submitted", 1, reserve=reserve).most_steps_late(12) == slices * groups - 1


def test_a_slice_is_a_span_with_its_number_and_version(tmp_path: Path) -> None:
    """A run without slices has none."""
    seen = []
    for tokens in (4, None):
        made = Trained(Slices(tokens, 2, "finished", 2), [3, 11, 5], 0, [], refill=False)
        folder = tmp_path / str(tokens)
        folder.mkdir()
        with recording(Trace(folder, Process(0, "rank 0", 1), own_clock(), 5, dict)):
            made.step()
            made.step()
        (events,) = read_traces(folder, [0])
        seen.append([one["args"] for one in events.events if one["name"] == "slice"])
        if tokens:
            assert made.version_of_slice == {one["number"]: one["version"] for one in seen[0]}
    assert len(seen[0]) > 2
    assert not seen[1]


JOB = Path(__file__).with_name("stream_job.py")
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
    return results(run_ranks(JOB, ranks, [str(tmp_path_factory.mktemp("stream")), f"layout={layout}"]))


@pytest.mark.parametrize("check", CHECKS)
def test_stream(outcome: dict[str, str], check: str) -> None:
    assert not outcome[check], outcome[check]
