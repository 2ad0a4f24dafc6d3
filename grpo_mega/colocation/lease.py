"""Who may use the device: a state machine that trainer and engine walk through together, one turn after the other.

    free -> trainer acquiring -> training -> trainer draining -> trainer releasing -> free
    free -> engine resuming weights -> engine loading -> engine resuming cache -> generating
         -> engine draining -> engine releasing -> free

While the engine is loading, its weights are back and can be replaced and its KV cache is not: nothing else needs the
memory at that moment. Whoever generates or trains announces each piece of work (`begin`, `end`). A device is asked back
with `ask_release`: from then on no work begins, and when the last piece has ended the owner is releasing: it frees
its memory and says so with `to(State.FREE)`.

Nothing happens here but bookkeeping: no threads, no memory, and the clock is the caller's. One lease belongs to one
thread; several need a lock around it. So a limit is noticed by whoever calls next: a long state is to be made of steps
with `check` between them. What a single step waits for needs a limit of its own, `rollout.sglang.answer_seconds` where
it is an engine's answer. The two have different ends: an engine that does not answer is started anew and the run goes
on; a state that lasts too long, though every answer came in time, ends the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import count
from typing import Any

from grpo_mega.config.schema import Timeouts


class State(Enum):
    """Where the device is in its round; the value is also the name of its limit in `Timeouts`."""

    FREE = "free"
    TRAINER_ACQUIRING = "trainer_acquiring"
    TRAINING = "training"
    TRAINER_DRAINING = "trainer_draining"
    TRAINER_RELEASING = "trainer_releasing"
    ENGINE_RESUMING_WEIGHTS = "engine_resuming_weights"
    ENGINE_LOADING = "engine_loading"
    ENGINE_RESUMING_CACHE = "engine_resuming_cache"
    GENERATING = "generating"
    ENGINE_DRAINING = "engine_draining"
    ENGINE_RELEASING = "engine_releasing"

    def __str__(self) -> str:
        return self.value.replace("_", " ")


class Owner(Enum):
    """Who may touch the device."""

    TRAINER = "trainer"
    ENGINE = "engine"


LEGAL: dict[State, tuple[State, ...]] = {
    State.FREE: (State.TRAINER_ACQUIRING, State.ENGINE_RESUMING_WEIGHTS),
    State.TRAINER_ACQUIRING: (State.TRAINING,),
    State.TRAINER_RELEASING: (State.FREE,),
    State.ENGINE_RESUMING_WEIGHTS: (State.ENGINE_LOADING,),
    State.ENGINE_LOADING: (State.ENGINE_RESUMING_CACHE,),
    State.ENGINE_RESUMING_CACHE: (State.GENERATING,),
    State.ENGINE_RELEASING: (State.FREE,),
}
"""What `Lease.to` accepts; draining and releasing are reached through `ask_release` and `end`."""

_TRAINERS = (State.TRAINER_ACQUIRING, State.TRAINING, State.TRAINER_DRAINING, State.TRAINER_RELEASING)
_DRAINS = {State.TRAINING: State.TRAINER_DRAINING, State.GENERATING: State.ENGINE_DRAINING}
_DRAINED = {State.TRAINER_DRAINING: State.TRAINER_RELEASING, State.ENGINE_DRAINING: State.ENGINE_RELEASING}

_REMEDY = {
    State.FREE: "nobody took the device: look at what should have come next in the run's log",
    State.TRAINER_ACQUIRING: "look at the memory ledger: has the engine returned its memory?",
    State.TRAINER_DRAINING: "look at the stacks of all ranks: one of them does not come out of its step",
    State.TRAINER_RELEASING: "look at the host's free memory, which the weights and the optimizer move to",
    State.ENGINE_RESUMING_WEIGHTS: "look at the engine's log and at the memory ledger: has the trainer left?",
    State.ENGINE_LOADING: "look at the engine's log and at the ranks that send the weights; restart the engine",
    State.ENGINE_RESUMING_CACHE: "look at the engine's log; lower the share of memory that its KV cache takes",
    State.ENGINE_DRAINING: "abort the requests in flight, which returns what they have; restart an engine that hangs",
    State.ENGINE_RELEASING: "look at the engine's log and restart the engine",
}


@dataclass(frozen=True)
class Transition:
    """One change of state, `at` the clock's seconds; `why` where there is more to say."""

    at: float
    before: str
    after: str
    why: str = ""


class LeaseError(RuntimeError):
    """The lease cannot do what was asked, and is as it was before.

    Attributes:
        post_mortem: What `Lease.post_mortem` said at that moment; plain data for json.dumps.
    """

    def __init__(self, message: str, post_mortem: dict[str, Any]) -> None:
        super().__init__(message)
        self.post_mortem = post_mortem


class LeaseTimeout(LeaseError):
    """A state lasted longer than it may. Every further call says so again, until the owner is forfeited."""


class Lease:
    """The device's owner and state.

    All methods but `forfeit` and `post_mortem` raise `LeaseTimeout` when the state has outlasted its limit, and
    `LeaseError` when what is asked is not legal now.
    """

    def __init__(self, timeouts: Timeouts, clock: Callable[[], float], remembered: int = 50) -> None:
        """A free device. `clock` gives seconds that never decrease; the last `remembered` transitions are kept."""
        self.timeouts = timeouts
        self._clock = clock
        self._state = State.FREE
        self._since = clock()
        self._history: deque[Transition] = deque(maxlen=remembered)
        self._tickets = count()
        self._work: dict[int, str] = {}

    @property
    def state(self) -> State:
        """Where the device is in its round."""
        return self._state

    @property
    def owner(self) -> Owner | None:
        """Who may touch the device; None while it is free."""
        if self._state is State.FREE:
            return None
        return Owner.TRAINER if self._state in _TRAINERS else Owner.ENGINE

    @property
    def deadline(self) -> float | None:
        """The last moment, on the caller's clock, that the present state may last to; None without a limit."""
        limit = getattr(self.timeouts, self._state.value, None)
        return None if limit is None else self._since + limit

    def check(self) -> None:
        """Does nothing before the deadline; for whoever waits."""
        if self.deadline is not None and self._clock() > self.deadline:
            raise LeaseTimeout(self._overdue(), self.post_mortem())

    def to(self, state: State) -> None:
        """The next transition has happened, or begins: see `LEGAL`."""
        self.check()
        if state not in LEGAL.get(self._state, ()):
            raise self._illegal(f"go to {state}")
        self._enter(state)

    def begin(self, work: str) -> int:
        """A request or a training step begins; `work` names it in errors. Returns the ticket that `end` asks for."""
        self.check()
        if self._state not in _DRAINS:
            raise self._illegal(f"begin {work}")
        ticket = next(self._tickets)
        self._work[ticket] = work
        return ticket

    def end(self, ticket: int) -> None:
        """A piece of work has ended, well or badly; the last one of a draining owner lets it release the device."""
        self.check()
        if ticket not in self._work:
            raise self._illegal(f"end work {ticket}, which has ended before or was lost with its owner")
        del self._work[ticket]
        self._release_if_drained()

    def ask_release(self) -> bool:
        """Asks the owner to give the device back; returns whether it can at once, without work to wait for."""
        self.check()
        if self._state not in _DRAINS:
            raise self._illegal("ask for the device")
        self._enter(_DRAINS[self._state])
        return self._release_if_drained()

    def forfeit(self, owner: Owner, why: str) -> None:
        """The owner's process is gone, and its memory and work with it: the device is free, whatever the state was."""
        if owner is not self.owner:
            raise self._illegal(f"forfeit the {owner.value}'s lease")
        lost, self._work = self._in_flight(), {}
        self._enter(State.FREE, f"the {owner.value} forfeits the device ({why}); lost: {lost}")

    def post_mortem(self) -> dict[str, Any]:
        """State, owner, work in flight, limits and the last transitions, as plain data for json.dumps."""
        return {
            "state": self._state.value,
            "owner": self.owner.value if self.owner else None,
            "since": self._since,
            "now": self._clock(),
            "in_flight": list(self._work.values()),
            "transitions": [asdict(transition) for transition in self._history],
            "timeouts": asdict(self.timeouts),
        }

    def _enter(self, state: State, why: str = "") -> None:
        now = self._clock()
        self._history.append(Transition(now, self._state.value, state.value, why))
        self._state, self._since = state, now

    def _release_if_drained(self) -> bool:
        drained = self._state in _DRAINED and not self._work
        if drained:
            self._enter(_DRAINED[self._state])
        return drained

    def _illegal(self, asked: str) -> LeaseError:
        return LeaseError(f"cannot {asked} while {self._described()}; legal now: {self._legal()}", self.post_mortem())

    def _legal(self) -> str:
        """What can be called now."""
        moves = [f"to(State.{state.name})" for state in LEGAL.get(self._state, ())]
        if self._state in _DRAINS:
            moves += ["begin", "ask_release"]
        if self._work:
            moves.append("end")
        if self.owner:
            moves.append(f"forfeit(Owner.{self.owner.name})")
        return ", ".join(moves)

    def _described(self) -> str:
        owner = f"owned by the {self.owner.value}" if self.owner else "owned by nobody"
        return f"the device is {self._state}, {owner}, in flight: {self._in_flight()}"

    def _in_flight(self) -> str:
        names = list(self._work.values())
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return ", ".join(names[:3]) + more if names else "nothing"

    def _overdue(self) -> str:
        name = self._state.value
        lasted, limit = self._clock() - self._since, getattr(self.timeouts, name)
        return (
            f"{self._described()}, for {lasted:.1f} s; rollout.sglang.timeouts.{name} allows {limit:g} s. "
            f"{_REMEDY[self._state]}. Before: {' -> '.join(str(State(t.before)) for t in list(self._history)[-5:])}"
        )
