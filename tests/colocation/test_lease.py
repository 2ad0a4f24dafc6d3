"""The lease under any sequence of calls: two users never share the device, and no limit passes unnoticed."""

from __future__ import annotations

import json
import re
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from grpo_mega.colocation.lease import REMEMBERED, Lease, LeaseError, LeaseTimeout, Owner, State
from grpo_mega.config.schema import Timeouts

# The documented round, from the trainer's turn through the engine's and back; no other step may be accepted.
ROUND = [
    State.TRAINING,
    State.TRAINER_RELEASING,
    State.ENGINE_RESUMING_WEIGHTS,
    State.ENGINE_LOADING,
    State.ENGINE_RESUMING_CACHE,
    State.GENERATING,
    State.ENGINE_RELEASING,
    State.TRAINER_ACQUIRING,
]
TRAINER_STATES = (State.TRAINING, State.TRAINER_RELEASING, State.TRAINER_ACQUIRING)
UNLIMITED = (State.TRAINING, State.GENERATING)
# Whole and different for each state: no deadline is hit by rounding or by another state's limit.
TIMEOUTS = Timeouts(*range(3, 3 + len(fields(Timeouts))))
seconds = st.sampled_from([0, 0, 1, 3])


def owner_of(state: State) -> Owner:
    return Owner.TRAINER if state in TRAINER_STATES else Owner.ENGINE


def after(state: State) -> State:
    return ROUND[(ROUND.index(state) + 1) % len(ROUND)]


class Device(RuleBasedStateMachine):
    """Calls a lease in any order, and knows independently of it who has the device and which calls must be refused."""

    @initialize()
    def start(self) -> None:
        self.now = 100
        self.lease = Lease(TIMEOUTS, lambda: self.now)
        self.state, self.entered = State.TRAINING, self.now

    def overdue(self) -> bool:
        limit = getattr(TIMEOUTS, self.state.value, None)
        return limit is not None and self.now > self.entered + limit

    def entered_now(self, state: State) -> None:
        self.state, self.entered = state, self.now

    @rule(passed=seconds)
    def time_passes(self, passed: int) -> None:
        self.now += passed

    @rule(state=st.sampled_from(State))
    def anywhere(self, state: State) -> None:
        self.go(state)

    @rule()
    def onwards(self) -> None:
        """A legal step, so that rounds are completed."""
        self.go(after(self.state))

    def go(self, state: State) -> None:
        """Refused exactly when it is illegal or too late, and then nothing has changed."""
        before = (self.lease.state, self.lease.owner, self.lease.deadline, self.lease.post_mortem())
        if state is after(self.state) and not self.overdue():
            self.lease.to(state)
            self.entered_now(state)
            return
        with pytest.raises(LeaseError) as refused:
            self.lease.to(state)
        assert isinstance(refused.value, LeaseTimeout) == self.overdue()
        assert (self.lease.state, self.lease.owner, self.lease.deadline, self.lease.post_mortem()) == before
        assert refused.value.post_mortem == before[-1]

    @rule()
    def forfeit(self) -> None:
        if owner_of(self.state) is Owner.ENGINE:  # also when overdue: it is the way out
            self.lease.forfeit("killed")
            self.entered_now(State.TRAINER_ACQUIRING)
        else:
            with pytest.raises(LeaseError, match="cannot forfeit the engine's turn"):
                self.lease.forfeit("killed")

    @invariant()
    def agree(self) -> None:
        assert self.lease.state is self.state
        assert self.lease.owner is owner_of(self.state)

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
TestDevice.settings = settings(max_examples=50, stateful_step_count=60, deadline=None)


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


def reach(lease: Lease, wanted: State) -> None:
    """From the start to any state."""
    for state in ROUND[1 : ROUND.index(wanted) + 1]:
        lease.to(state)


@pytest.mark.parametrize("asked", State)
@pytest.mark.parametrize("now", State)
def test_no_step_is_accepted_but_the_documented_ones(lease: Lease, now: State, asked: State) -> None:
    reach(lease, now)
    assert lease.state is now
    if asked is after(now):
        lease.to(asked)
        assert lease.state is asked
    else:
        with pytest.raises(LeaseError, match=f"cannot go to {asked} while the device is {now}"):
            lease.to(asked)
        assert lease.state is now


def test_an_illegal_call_names_the_legal_ones(lease: Lease) -> None:
    with pytest.raises(LeaseError, match=r"owned by the trainer; legal now: to\(State.TRAINER_RELEASING\)$"):
        lease.to(State.GENERATING)
    reach(lease, State.GENERATING)
    message = (
        "cannot go to trainer acquiring while the device is generating, owned by the engine; "
        r"legal now: to\(State.ENGINE_RELEASING\), forfeit$"
    )
    with pytest.raises(LeaseError, match=message):
        lease.to(State.TRAINER_ACQUIRING)


@pytest.mark.parametrize("name", [field.name for field in fields(Timeouts)])
def test_every_limit_is_kept_to_the_moment_and_its_error_says_all(clock: Clock, lease: Lease, name: str) -> None:
    reach(lease, State(name))
    clock.now = lease.deadline
    lease.check()
    clock.now += 1e-3
    with pytest.raises(LeaseTimeout) as late:
        lease.to(after(State(name)))
    limit = getattr(Timeouts(), name)
    for part in (f"timeouts.{name} allows {limit:g} s", f"for {limit:.1f} s", f"owned by the {name.split('_')[0]}"):
        assert part in str(late.value)
    assert re.search("look at", str(late.value))
    with pytest.raises(LeaseTimeout):  # it does not go away by itself
        lease.check()


def test_every_limit_belongs_to_a_state() -> None:
    assert {field.name for field in fields(Timeouts)} == {state.value for state in State if state not in UNLIMITED}


@pytest.mark.parametrize("state", UNLIMITED)
def test_training_and_generating_may_take_as_long_as_they_like(clock: Clock, lease: Lease, state: State) -> None:
    reach(lease, state)
    clock.now += 1e9
    lease.check()
    lease.to(after(state))


def test_a_dead_engine_gives_the_device_back(clock: Clock, lease: Lease) -> None:
    reach(lease, State.ENGINE_RELEASING)
    clock.now += 1e6
    with pytest.raises(LeaseTimeout):
        lease.check()
    lease.forfeit("exit code -9")
    assert (lease.state, lease.owner) == (State.TRAINER_ACQUIRING, Owner.TRAINER)
    assert "exit code -9" in json.dumps(lease.post_mortem())
    lease.to(State.TRAINING)


@given(steps=st.integers(0, 2 * REMEMBERED))
def test_the_post_mortem_holds_the_last_transitions_with_their_times(steps: int) -> None:
    clock = Clock()
    lease = Lease(Timeouts(), clock)
    happened = []
    for step in range(steps):
        before, clock.now = lease.state, clock.now + step
        lease.to(after(before))
        happened.append((clock.now, before.value, after(before).value))
    with pytest.raises(LeaseError) as refused:
        lease.to(lease.state)
    kept = json.loads(json.dumps(refused.value.post_mortem))
    assert [(t["at"], t["before"], t["after"]) for t in kept["transitions"]] == happened[-REMEMBERED:]
    assert (kept["state"], kept["owner"]) == (lease.state.value, lease.owner.value)
    assert kept["now"] == clock.now
