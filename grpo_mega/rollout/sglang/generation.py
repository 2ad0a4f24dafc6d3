"""One rank's part of what engines generate: what its engine was sent, what has arrived, whether it is at work.

All times and errors stay with the engine that they happen to; `engine.py` brings the ranks together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from grpo_mega.rollout.completions import Completion
from grpo_mega.rollout.contract import EngineError
from grpo_mega.rollout.sglang.process import EngineProcess


class Generation:
    """What one engine has under way, from the first sample until nothing is left.

    Attributes:
        finished: Number of the sample -> completion, of those that have arrived and were not handed out.
        failure: What went wrong, when something did.
        refused: Whether the engine answered, and not with what can be used: nothing that is still to come will help.
    """

    def __init__(
        self,
        process: EngineProcess | None,
        completion: Callable[..., Completion],
        silence_seconds: float,
        abort_seconds: float,
    ) -> None:
        """Nothing is under way.

        Args:
            process: The engine; None on a rank that owns none.
            completion: Makes one of a sample's number and what the engine says: token ids, log-probs, reason, experts.
            silence_seconds: Longest time without a sign of life: tokens, or a finished sample.
            abort_seconds: The same once it was aborted.
        """
        self._process, self._completion = process, completion
        self._silence_seconds, self._abort_seconds = silence_seconds, abort_seconds
        self._requests: set[int] = set()  # that the engine has not answered
        self._due: set[int] = set()  # samples that have not arrived
        self._aborted = self.refused = False
        self._heard = time.monotonic()
        self.finished: dict[int, Completion] = {}
        self.failure: EngineError | None = None

    @property
    def at_work(self) -> bool:
        """Whether there is something to wait for."""
        return bool(self._requests)

    def send(self, samples: Mapping[int, dict[str, Any]]) -> None:
        """Has the engine generate these samples as well: number -> SGLang's arguments."""
        if samples and not self.failure:
            if not self.at_work:
                self._heard = time.monotonic()
            self._aborted = False  # the engine takes these when those have ended
            self._due.update(samples)
            self._try(lambda process: self._requests.add(process.tell("generate", samples=dict(samples))))

    def listen(self, seconds: float) -> None:
        """Takes what arrives within about `seconds`, or until the engine is done."""
        until = time.monotonic() + seconds
        while self.at_work and (left := until - time.monotonic()) > 0:
            self._try(lambda process: self._take(process, process.hear(left)))

    def abort(self) -> None:
        """Asks the engine to hand out what it has; `listen` takes it."""
        if self.at_work and not self._aborted:
            self._aborted, self._heard = True, time.monotonic()
            self._try(lambda process: process.tell("abort"))

    def _take(self, process: EngineProcess, message: tuple[Any, ...] | None) -> None:
        if message is None:
            limit = self._abort_seconds if self._aborted else self._silence_seconds
            if time.monotonic() - self._heard > limit:
                raise process.lost(f"generated nothing within {limit:g} s")
            return
        self._heard = time.monotonic()
        kind, *rest = message
        if kind == "sample":
            number, *said = rest
            self._due.discard(number)
            try:
                self.finished[number] = self._completion(number, *said)
            except EngineError as error:  # the engine itself is sound: what it is doing has to end
                self._refuse(error)
        elif kind == "answer":
            self._requests.discard(rest[0])
            if self._due and not self._requests:
                self._refuse(process.refusal(f"generate: {len(self._due)} samples never came"))
        elif kind == "error":
            self._requests.discard(rest[0])
            self._refuse(process.refusal(rest[1]))

    def _refuse(self, error: EngineError) -> None:
        self.failure, self.refused = self.failure or error, True
        self.abort()

    def _try(self, work: Callable[[EngineProcess], object]) -> None:
        assert self._process, "only engines are sent something"
        try:
            work(self._process)
        except EngineError as error:  # it was lost
            self.failure = self.failure or error
            self._requests.clear()
