"""One engine's part of a generation: what it is to do, what has arrived, whether it goes on.

All times and errors stay with the engine that they happen to; `engine.py` brings the ranks together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_mega.platform.stop import Interrupted
from grpo_mega.rollout.completions import Completion
from grpo_mega.rollout.contract import EngineError
from grpo_mega.rollout.sglang.process import EngineProcess


@dataclass
class Share:
    """What one engine is to generate, and what it has finished; outlives an engine that is lost on the way.

    Attributes:
        of: What was asked for; another call has nothing to gain from what is finished.
        wanted: Places in the list of samples.
        finished: Place -> completion.
    """

    of: Any = None
    wanted: list[int] = field(default_factory=list)
    finished: dict[int, Completion] = field(default_factory=dict)

    @property
    def unfinished(self) -> list[int]:
        """The places that are still to do."""
        return [place for place in self.wanted if place not in self.finished]


class Generation:
    """An engine at work on its share.

    Attributes:
        busy: Whether there is something to wait for.
        failure: What went wrong, when something did.
        refused: Whether the engine answered, and not with what can be used: nothing that is still to come will help.
    """

    def __init__(
        self,
        process: EngineProcess | None,
        share: Share,
        request: Callable[[int], dict[str, Any]],
        completion: Callable[..., Completion],
        silence_seconds: float,
        abort_seconds: float,
    ) -> None:
        """Sends the requests.

        Args:
            process: The engine; None on a rank that owns none.
            share: What it is to do.
            request: SGLang's arguments for the sample at a place.
            completion: Makes one of a place and what the engine says: token ids, log-probs, reason, experts.
            silence_seconds: Longest time without a sign of life: tokens, or a finished sample.
            abort_seconds: The same once it was aborted.
        """
        self._process, self._share, self._completion = process, share, completion
        self._places = share.unfinished
        self._limit, self._abort_seconds = silence_seconds, abort_seconds
        self._aborted = self.refused = False
        self.busy = bool(process and self._places)
        self.failure: EngineError | None = None
        self._heard = time.monotonic()
        if self.busy:
            self._try(lambda p: p.tell("generate", requests=[request(place) for place in self._places]))

    def go_on(self, seconds: float) -> None:
        """Takes what arrives within about `seconds`, or until the engine is done."""
        until = time.monotonic() + seconds
        while self.busy and (left := until - time.monotonic()) > 0:
            self._try(lambda p: self._take(p.hear(left)))

    def abort(self) -> None:
        """Asks the engine to hand out what it has; `go_on` takes it."""
        if self.busy and not self._aborted:
            self._aborted, self._limit, self._heard = True, self._abort_seconds, time.monotonic()
            self._try(lambda p: p.tell("abort"))

    def _take(self, message: tuple[Any, ...] | None) -> None:
        if message is None:
            self._check_silence()
            return
        self._heard = time.monotonic()
        if message[0] == "answer":
            self.busy = False
        elif message[0] == "sample":
            _, number, *said = message
            place = self._places[number]
            try:
                self._share.finished[place] = self._completion(place, *said)
            except EngineError as error:  # the engine itself is sound: what it is doing has to end
                self.failure, self.refused = self.failure or error, True
                self.abort()

    def _check_silence(self) -> None:
        assert self._process
        if time.monotonic() - self._heard > self._limit:
            raise self._process.lost(f"generated nothing within {self._limit:g} s")

    def _try(self, work: Callable[[EngineProcess], None]) -> None:
        assert self._process
        try:
            work(self._process)
        except EngineError as error:
            self.failure, self.busy = error, False


def run_together(
    generation: Generation,
    any_rank: Callable[[Sequence[bool]], list[bool]],
    interrupted: Callable[[], bool] | None,
    aborted: Callable[[], bool],
    seconds: float,
) -> None:
    """Goes on until the engines of all ranks are done; every rank must call it.

    Args:
        generation: This rank's part.
        any_rank: Which of (busy, interrupted, aborted) hold on any rank.
        interrupted: Whether this rank wants generation to be given up.
        aborted: Whether it wants to have what there is.
        seconds: How often the ranks ask each other.

    Raises:
        Interrupted: On every rank, when one was interrupted before all engines were done; all of them have stopped.
    """
    given_up = False
    while True:
        generation.go_on(seconds)
        busy, stop, early = any_rank(
            [generation.busy, bool(interrupted and interrupted()), aborted() or generation.refused]
        )
        given_up |= busy and stop
        if stop or early:
            generation.abort()
        if not busy:
            break
    if given_up:
        raise Interrupted
