"""Ownership of the device: a state machine of the turns of trainer and engine.

    training -> trainer releasing -> engine resuming weights -> engine loading -> engine resuming cache -> generating
             -> engine releasing -> trainer acquiring -> training

While the engine is loading, it has memory for weights, which can be replaced, but not for its KV cache: nothing else
needs memory then. An engine that is lost, in whatever state, leaves the device to the trainer (`forfeit`).

Bookkeeping only: no threads, no memory, and the clock is the caller's. One lease belongs to one thread; several need a
lock around it. So a limit is noticed only at the next call: split a long state into steps with `check` between them.
Waiting within a single step needs its own limit, `rollout.sglang.answer_seconds` where it is an engine's answer. They
differ in effect: an engine that does not answer is restarted and the run continues; a state that lasts too long,
although every answer came in time, ends the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from grpo_mega.config.schema import Timeouts

REMEMBERED = 50
"""Number of last transitions in a post-mortem."""


class State(Enum):
    """State of the device in its cycle; the value is also the name of its limit in `Timeouts`, if it has one."""

    TRAINING = "training"
    TRAINER_RELEASING = "trainer_releasing"
    ENGINE_RESUMING_WEIGHTS = "engine_resuming_weights"
    ENGINE_LOADING = "engine_loading"
    ENGINE_RESUMING_CACHE = "engine_resuming_cache"
    GENERATING = "generating"
    ENGINE_RELEASING = "engine_releasing"
    TRAINER_ACQUIRING = "trainer_acquiring"

    def __str__(self) -> str:
        return self.value.replace("_", " ")


class Owner(Enum):
    """Owner of the device."""

    TRAINER = "trainer"
    ENGINE = "engine"


NEXT: dict[State, State] = {
    State.TRAINING: State.TRAINER_RELEASING,
    State.TRAINER_RELEASING: State.ENGINE_RESUMING_WEIGHTS,
    State.ENGINE_RESUMING_WEIGHTS: State.ENGINE_LOADING,
    State.ENGINE_LOADING: State.ENGINE_RESUMING_CACHE,
    State.ENGINE_RESUMING_CACHE: State.GENERATING,
    State.GENERATING: State.ENGINE_RELEASING,
    State.ENGINE_RELEASING: State.TRAINER_ACQUIRING,
    State.TRAINER_ACQUIRING: State.TRAINING,
}
"""State -> next state of the cycle."""

_TRAINERS = (State.TRAINER_ACQUIRING, State.TRAINING, State.TRAINER_RELEASING)

_REMEDY = {
    State.TRAINER_ACQUIRING: "look at the memory ledger: has the engine returned its memory?",
    State.TRAINER_RELEASING: "look at the host's free memory, which the weights and the optimizer move to",
    State.ENGINE_RESUMING_WEIGHTS: "look at the engine's log and at the memory ledger: has the trainer left?",
    State.ENGINE_LOADING: "look at the engine's log and at the ranks that send the weights; restart the engine",
    State.ENGINE_RESUMING_CACHE: "look at the engine's log; lower the share of memory that its KV cache takes",
    State.ENGINE_RELEASING: "look at the engine's log and restart the engine",
}


@dataclass(frozen=True)
class Transition:
    """One change of state, at time `at` in seconds of the clock; `why` gives a reason if there is one."""

    at: float
    before: str
    after: str
    why: str = ""


class LeaseError(RuntimeError):
    """The requested change is not possible; the lease is unchanged.

    Attributes:
        post_mortem: `Lease.post_mortem` at that moment; plain data for json.dumps.
    """

    def __init__(self, message: str, post_mortem: dict[str, Any]) -> None:
        super().__init__(message)
        self.post_mortem = post_mortem


class LeaseTimeout(LeaseError):
    """A state exceeded its time limit. Every further call raises this again, until the engine is forfeited."""


class Lease:
    """Owner and state of the device.

    `check` and `to` raise `LeaseTimeout` when the state has outlasted its limit; `to` and `forfeit` raise `LeaseError`
    when the change is not legal now.
    """

    def __init__(self, timeouts: Timeouts, clock: Callable[[], float]) -> None:
        """The trainer owns the device, in training. `clock` gives seconds that never decrease."""
        self.timeouts = timeouts
        self._clock = clock
        self._state = State.TRAINING
        self._since = clock()
        self._history: deque[Transition] = deque(maxlen=REMEMBERED)

    @property
    def state(self) -> State:
        """State of the device in its cycle."""
        return self._state

    @property
    def owner(self) -> Owner:
        """Owner of the device."""
        return Owner.TRAINER if self._state in _TRAINERS else Owner.ENGINE

    @property
    def deadline(self) -> float | None:
        """End of the current state's time limit, on the caller's clock; None without a limit."""
        limit = getattr(self.timeouts, self._state.value, None)
        return None if limit is None else self._since + limit

    def check(self) -> None:
        """Raises `LeaseTimeout` after the deadline; for code that waits."""
        if self.deadline is None or self._clock() <= self.deadline:
            return
        name = self._state.value
        lasted, limit = self._clock() - self._since, getattr(self.timeouts, name)
        before = " -> ".join(str(State(transition.before)) for transition in list(self._history)[-5:])
        overdue = (
            f"{self._described()}, for {lasted:.1f} s; rollout.sglang.timeouts.{name} allows {limit:g} s. "
            f"{_REMEDY[self._state]}. Before: {before}"
        )
        raise LeaseTimeout(overdue, self.post_mortem())

    def to(self, state: State) -> None:
        """Changes to the next state of the cycle, see `NEXT`."""
        self.check()
        if state is not NEXT[self._state]:
            raise self._illegal(f"go to {state}")
        self._enter(state)

    def forfeit(self, why: str) -> None:
        """Records that the engine and its memory are lost: the trainer acquires the device, even after the deadline."""
        if self.owner is not Owner.ENGINE:
            raise self._illegal("forfeit the engine's turn")
        self._enter(State.TRAINER_ACQUIRING, f"the engine forfeits the device: {why}")

    def post_mortem(self) -> dict[str, Any]:
        """State, owner, limits and the last transitions, as plain data for json.dumps."""
        return {
            "state": self._state.value,
            "owner": self.owner.value,
            "since": self._since,
            "now": self._clock(),
            "transitions": [asdict(transition) for transition in self._history],
            "timeouts": asdict(self.timeouts),
        }

    def _enter(self, state: State, why: str = "") -> None:
        now = self._clock()
        self._history.append(Transition(now, self._state.value, state.value, why))
        self._state, self._since = state, now

    def _illegal(self, asked: str) -> LeaseError:
        legal = f"to(State.{NEXT[self._state].name})" + (", forfeit" if self.owner is Owner.ENGINE else "")
        return LeaseError(f"cannot {asked} while {self._described()}; legal now: {legal}", self.post_mortem())

    def _described(self) -> str:
        return f"the device is {self._state}, owned by the {self.owner.value}"
