"""The lease under any sequence of calls: two users never share the device, and a release that was asked for comes."""

from __future__ import annotations

import json
import re
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from grpo_mega.colocation.lease import Lease, LeaseError, LeaseTimeout, Owner, State
from grpo_mega.config.schema import Timeouts

TRAINER_STATES = [State.TRAINER_ACQUIRING, State.TRAINING, State.TRAINER_DRAINING, State.TRAINER_RELEASING]
# What the driver of a round may do, as documented; nothing else may be accepted.
STEPS = {
    ("free", "trainer_acquiring"),
    ("trainer_acquiring", "training"),
    ("trainer_releasing", "free"),
    ("free", "engine_resuming_weights"),
    ("engine_resuming_weights", "engine_loading"),
    ("engine_loading", "engine_resuming_cache"),
    ("engine_resuming_cache", "generating"),
    ("engine_releasing", "free"),
}
WORKING = (State.TRAINING, State.GENERATING)
DRAINING = {State.TRAINER_DRAINING: State.TRAINER_RELEASING, State.ENGINE_DRAINING: State.ENGINE_RELEASING}
# Whole and different for each state: no deadline is hit by rounding or by another state's limit.
TIMEOUTS = Timeouts(*range(3, 3 + len(fields(Timeouts))))
seconds = st.sampled_from([0, 0, 1, 3])


def owner_of(state: State) -> Owner | None:
    return {State.FREE: None}.get(state, Owner.TRAINER if state in TRAINER_STATES else Owner.ENGINE)


class Device(RuleBasedStateMachine):
    """Calls a lease in any order, and knows independently of it who holds what and which calls must be refused."""

    @initialize()
    def start(self) -> None:
        self.now = 100
        self.lease = Lease(TIMEOUTS, lambda: self.now)
        self.state, self.entered = State.FREE, self.now
        self.working: set[int] = set()
        self.ended: set[int] = set()

    def overdue(self) -> bool:
        limit = getattr(TIMEOUTS, self.state.value, None)
        return limit is not None and self.now > self.entered + limit

    def attempt(self, call, legal: bool):
        """What `call` returns; refused exactly when it is illegal or too late, and then nothing has changed."""
        before = (self.lease.state, self.lease.owner, self.lease.deadline, self.lease.post_mortem())
        if legal and not self.overdue():
            return call()
        with pytest.raises(LeaseError) as refused:
            call()
        assert isinstance(refused.value, LeaseTimeout) == self.overdue()
        assert (self.lease.state, self.lease.owner, self.lease.deadline, self.lease.post_mortem()) == before
        assert refused.value.post_mortem == before[-1]
        return None

    def entered_now(self, state: State) -> None:
        self.state, self.entered = state, self.now

    def drained(self) -> bool:
        """The promised wake-up: an owner that was asked and has no work is releasing already."""
        if self.state in DRAINING and not self.working:
            self.entered_now(DRAINING[self.state])
            return True
        return False

    @rule(passed=seconds)
    def time_passes(self, passed: int) -> None:
        self.now += passed

    @rule(state=st.sampled_from(State))
    def anywhere(self, state: State) -> None:
        self.go(state)

    @rule(choice=st.integers(0, 1))
    def onwards(self, choice: int) -> None:
        """A legal step, so that rounds are completed."""
        ahead = sorted(after for before, after in STEPS if before == self.state.value)
        if ahead:
            self.go(State(ahead[choice % len(ahead)]))

    def go(self, state: State) -> None:
        legal = (self.state.value, state.value) in STEPS
        refused = not legal or self.overdue()
        self.attempt(lambda: self.lease.to(state), legal)
        if not refused:
            self.entered_now(state)

    @rule()
    def begin(self) -> None:
        legal = self.state in WORKING
        ticket = self.attempt(lambda: self.lease.begin("a request"), legal)
        if legal:
            assert ticket not in self.working | self.ended
            self.working.add(ticket)

    @precondition(lambda self: self.working)
    @rule(data=st.data())
    def end(self, data) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.working)))
        refused = self.overdue()
        self.attempt(lambda: self.lease.end(ticket), True)
        if not refused:
            self.working.remove(ticket)
            self.ended.add(ticket)
            self.drained()

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def end_again(self, data) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.ended)))
        self.attempt(lambda: self.lease.end(ticket), False)

    @rule()
    def ask_release(self) -> None:
        legal = self.state in WORKING
        granted = self.attempt(self.lease.ask_release, legal)
        if legal:
            self.entered_now(State.TRAINER_DRAINING if self.state is State.TRAINING else State.ENGINE_DRAINING)
            assert granted == self.drained()

    @rule(owner=st.sampled_from(Owner))
    def forfeit(self, owner: Owner) -> None:
        if owner is owner_of(self.state):  # also when overdue: it is the way out
            self.lease.forfeit(owner, "killed")
            self.ended |= self.working
            self.working = set()
            self.entered_now(State.FREE)
        else:
            with pytest.raises(LeaseError):
                self.lease.forfeit(owner, "killed")

    @invariant()
    def agree(self) -> None:
        assert self.lease.state is self.state
        assert self.lease.owner is owner_of(self.state)
        assert len(self.lease.post_mortem()["in_flight"]) == len(self.working)

    @invariant()
    def nobody_works_on_a_device_that_is_changing_hands(self) -> None:
        assert not self.working or self.state in (*WORKING, *DRAINING)

    @invariant()
    def a_release_that_was_asked_for_waits_only_for_work(self) -> None:
        assert self.working or self.state not in DRAINING

    @invariant()
    def the_timeout_fires_when_it_is_due_and_not_before(self) -> None:
        if self.overdue():
            with pytest.raises(LeaseTimeout):
                self.lease.check()
            assert self.now > self.lease.deadline
        else:
            self.lease.check()
            assert self.lease.deadline is None or self.now <= self.lease.deadline


TestDevice = Device.TestCase
TestDevice.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)

TO_TRAINING = [State.TRAINER_ACQUIRING, State.TRAINING]
TO_GENERATING = [State.ENGINE_RESUMING_WEIGHTS, State.ENGINE_LOADING, State.ENGINE_RESUMING_CACHE, State.GENERATING]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lease(clock: Clock) -> Lease:
    return Lease(Timeouts(), clock)


def walk(lease: Lease, states: list[State]) -> None:
    for state in states:
        lease.to(state)


def reach(lease: Lease, wanted: State) -> None:
    """From free to any state, with a piece of work in flight where there can be one."""
    for state in TO_TRAINING if wanted in TRAINER_STATES else TO_GENERATING:
        if lease.state is not wanted:
            lease.to(state)
    if wanted in DRAINING:
        lease.begin("prompt 7")
    if lease.state is not wanted:
        lease.ask_release()


@pytest.mark.parametrize("asked", State)
@pytest.mark.parametrize("now", State)
def test_no_step_is_accepted_but_the_documented_ones(clock: Clock, now: State, asked: State) -> None:
    lease = Lease(Timeouts(), clock)
    if now is not State.FREE:
        reach(lease, now)
    assert lease.state is now
    if (now.value, asked.value) in STEPS:
        lease.to(asked)
        assert lease.state is asked
    else:
        with pytest.raises(LeaseError, match=f"cannot go to {asked} while the device is {now}"):
            lease.to(asked)
        assert lease.state is now


def test_two_whole_rounds(lease: Lease) -> None:
    owners = []
    for way in (TO_GENERATING, TO_TRAINING) * 2:
        walk(lease, way)
        first, second = lease.begin("first"), lease.begin("second")
        assert not lease.ask_release()
        lease.end(second)
        owners.append(lease.owner)
        with pytest.raises(LeaseError, match="cannot begin third"):
            lease.begin("third")
        lease.end(first)
        lease.to(State.FREE)
    assert owners == [Owner.ENGINE, Owner.TRAINER] * 2


def test_an_illegal_call_names_the_legal_ones(lease: Lease) -> None:
    with pytest.raises(LeaseError, match=r"legal now: to\(State.TRAINER_ACQUIRING\), to\(State.ENGINE_RESUMING_WEIGH"):
        lease.to(State.TRAINING)
    walk(lease, TO_GENERATING)
    for i in range(5):
        lease.begin(f"prompt {i}")
    said = (
        r"cannot go to trainer acquiring while the device is generating, owned by the engine, in flight: "
        r"prompt 0, prompt 1, prompt 2 and 2 more; legal now: begin, ask_release, end, forfeit\(Owner.ENGINE\)"
    )
    with pytest.raises(LeaseError, match=said):
        lease.to(State.TRAINER_ACQUIRING)


@pytest.mark.parametrize("name", [field.name for field in fields(Timeouts)])
def test_every_limit_is_kept_to_the_moment_and_its_error_says_all(clock: Clock, lease: Lease, name: str) -> None:
    if name != "free":
        reach(lease, State(name))
    assert lease.state.value == name
    clock.now = lease.deadline
    lease.check()
    clock.now += 1e-3
    with pytest.raises(LeaseTimeout) as late:
        lease.to(State.FREE)
    limit = getattr(Timeouts(), name)
    owner = f"owned by {'nobody' if name == 'free' else 'the ' + name.split('_')[0]}"
    in_flight = ", ".join(lease.post_mortem()["in_flight"])
    for part in (f"timeouts.{name} allows {limit:g} s", f"for {limit:.1f} s", owner, in_flight):
        assert part in str(late.value)
    assert re.search("look at|abort", str(late.value))
    with pytest.raises(LeaseTimeout):  # it does not go away by itself
        lease.check()


def test_every_limit_belongs_to_a_state() -> None:
    assert {field.name for field in fields(Timeouts)} == {state.value for state in State} - {"training", "generating"}


def test_training_and_generating_may_take_as_long_as_they_like(clock: Clock, lease: Lease) -> None:
    for way in (TO_TRAINING, TO_GENERATING):
        walk(lease, way)
        clock.now += 1e9
        lease.check()
        lease.ask_release()
        lease.to(State.FREE)


def test_a_dead_engine_gives_the_device_back_and_its_late_answers_end_nobody_elses_work(
    clock: Clock, lease: Lease
) -> None:
    walk(lease, TO_GENERATING)
    lost = lease.begin("prompt 1")
    lease.ask_release()
    clock.now += 1e6
    with pytest.raises(LeaseTimeout, match="prompt 1"):
        lease.check()
    lease.forfeit(Owner.ENGINE, "exit code -9")
    walk(lease, TO_GENERATING)
    running = lease.begin("prompt 2")
    lease.ask_release()
    with pytest.raises(LeaseError, match="lost with its owner"):
        lease.end(lost)
    assert lease.state is State.ENGINE_DRAINING
    lease.end(running)
    assert lease.state is State.ENGINE_RELEASING
    assert "exit code -9" in json.dumps(lease.post_mortem())
    assert "lost: prompt 1" in json.dumps(lease.post_mortem())


@given(st.integers(1, 30), st.integers(0, 12))
def test_the_post_mortem_holds_the_last_transitions_with_their_times(remembered: int, rounds: int) -> None:
    clock = Clock()
    lease = Lease(Timeouts(), clock, remembered)
    happened = []
    for i in range(rounds):
        for state in [*TO_TRAINING, None, State.FREE]:
            before, clock.now = lease.state.value, clock.now + i
            if state:
                lease.to(state)
                happened.append((clock.now, before, state.value))
            else:
                lease.ask_release()
                happened += [(clock.now, before, "trainer_draining")]
                happened += [(clock.now, "trainer_draining", "trainer_releasing")]
    with pytest.raises(LeaseError) as refused:
        lease.ask_release()
    kept = json.loads(json.dumps(refused.value.post_mortem))
    assert [(t["at"], t["before"], t["after"]) for t in kept["transitions"]] == happened[-remembered:]
    assert (kept["state"], kept["owner"], kept["now"]) == ("free", None, clock.now)
