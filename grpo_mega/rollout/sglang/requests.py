"""One rank's view of its engine's generation: requests sent, completions received and checked, whether it is busy.

Time limits and errors are kept per engine; `engine.py` keeps the ranks in step.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from grpo_mega.config.schema import ModelConfig
from grpo_mega.platform import trace
from grpo_mega.rollout.contract import EngineError
from grpo_mega.rollout.sglang.process import EngineProcess

ROW = "SGLang engine"
"""Row of the trace in which the owner of an engine records the engine's tasks and their durations."""


class SGLangCompletion(NamedTuple):
    """A completion as the engine's process sends it.

    `experts` is [tokens * layers * top k], see `routed`; `cached` counts the tokens before the completion that were in
    SGLang's prefix cache.
    """

    token_ids: array[int]
    logprobs: array[float]
    finish_reason: str
    experts: np.ndarray | None = None
    cached: int = 0


class Generation:
    """The samples under way in one engine, from the first submission until none is left.

    Attributes:
        finished: Number of the sample -> completion, for samples that arrived and were not handed out.
        failure: The first error; None when there was none.
        refused: Whether the engine refused a request, after which all other requests are aborted.
    """

    def __init__(self, process: EngineProcess | None, silence_seconds: float, abort_seconds: float) -> None:
        """Creates a generation without samples.

        Args:
            process: The engine; None on a rank that owns none.
            silence_seconds: Longest time without a sign of life: tokens, or a finished sample.
            abort_seconds: Longest time without a sign of life after an abort.
        """
        self._process = process
        self._silence_seconds, self._abort_seconds = silence_seconds, abort_seconds
        # Requests that the engine has not answered, and samples that have not arrived, by number. Both are needed: the
        # answer to a request comes after its samples, and tells apart a sample that is late from one that is missing.
        self._requests: set[int] = set()
        self._due: set[int] = set()
        self._aborted = self.refused = False
        self._heard = time.monotonic()
        # Begin, samples and tokens of the present work, for the trace.
        self._since, self._arrived, self._tokens = 0, 0, 0
        self.finished: dict[int, SGLangCompletion] = {}
        self.failure: EngineError | None = None

    @property
    def at_work(self) -> bool:
        """Whether the engine has unanswered requests."""
        return bool(self._requests)

    def send(self, samples: Mapping[int, dict[str, Any]]) -> None:
        """Submits further samples to the engine: number -> SGLang's arguments."""
        if samples and not self.failure:
            # An idle engine was rightly silent, so its silence counts from now.
            if not self.at_work:
                self._heard = time.monotonic()
                self._since, self._arrived, self._tokens = trace.now(), 0, 0
            # After an abort the engine accepts new samples once the aborted ones have ended (`Host._listen`), so a
            # later abort must be sent again.
            self._aborted = False
            self._due.update(samples)
            self._try(lambda process: self._requests.add(process.tell("generate", samples=dict(samples))))
            self._count()

    def listen(self, seconds: float) -> None:
        """Receives messages for about `seconds`, or until the engine has answered all requests."""
        until = time.monotonic() + seconds
        was_at_work, before = self.at_work, self._arrived
        while self.at_work and (left := until - time.monotonic()) > 0:
            self._try(lambda process: self._take(process, process.hear(left)))
        if self._arrived > before:
            self._count()
        if was_at_work and not self.at_work:
            about = {"samples": self._arrived, "tokens": self._tokens, "aborted": self._aborted}
            trace.record_beside(ROW, "generate", self._since, **about)

    def _count(self) -> None:
        """Records how many samples the engine has yet to finish."""
        trace.counter(ROW, **{"samples under way": len(self._due)})

    def abort(self) -> None:
        """Makes the engine end all samples and send their tokens so far; `listen` receives them."""
        if self.at_work and not self._aborted:
            # The limit for aborts counts from here, not from the last sign of life.
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
            number, *fields = rest
            self._due.discard(number)
            self.finished[number] = completion = SGLangCompletion(*fields)
            self._arrived, self._tokens = self._arrived + 1, self._tokens + len(completion.token_ids)
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
        assert self._process, "only the owner of an engine sends requests"
        try:
            work(self._process)
        except EngineError as error:
            # The engine was lost. Without requests it no longer counts as at work, so that nobody waits for it.
            self.failure = self.failure or error
            self._requests.clear()


def check(token_ids: array[int], logprobs: array[float]) -> None:
    """Refuses a completion that cannot be trained on.

    Raises:
        EngineError: There is not exactly one finite log-prob for each token.
    """
    if len(token_ids) != len(logprobs):
        raise EngineError(f"a sample of SGLang has {len(token_ids)} tokens and {len(logprobs)} log-probs")
    bad = np.flatnonzero(~np.isfinite(np.asarray(logprobs)))
    if len(bad):
        raise EngineError(
            f"SGLang gives token {bad[0]} of a sample the log-prob {logprobs[bad[0]]}: are its weights whole? Set "
            "rollout.sglang.verify_every=1 to have them checked after every push"
        )


def routed(experts: np.ndarray | None, tokens: int, model: ModelConfig) -> torch.Tensor:
    """Routed experts of each token of a sequence.

    Args:
        experts: [tokens * layers * top k] as SGLang returns them, dense layers included; None when it returned none.
        tokens: Number of tokens.
        model: The model that SGLang serves.

    Returns:
        [tokens, MoE layers, top k] int16.

    Raises:
        EngineError: Experts are missing, out of range, or repeated for one token.
    """
    moe = model.moe
    shape = (tokens, model.layers, moe.top_k)
    if experts is None or experts.size != math.prod(shape):
        size = "nothing" if experts is None else f"{experts.size:,} numbers"
        raise EngineError(f"SGLang returned {size} for the experts of {tokens} tokens; {math.prod(shape):,} are due")
    chosen = experts.reshape(shape)[:, moe.first_dense :]
    if chosen.min() < 0 or chosen.max() >= moe.experts:
        raise EngineError(
            f"SGLang sent tokens to experts {chosen.min()} to {chosen.max()}, but the model has {moe.experts}"
        )
    # A router never chooses an expert twice for one token. If SGLang's kernels do not record their choice, the buffer
    # has equal numbers, which may pass the check of the range.
    if moe.top_k > 1 and not np.diff(np.sort(chosen, axis=-1), axis=-1).all():
        raise EngineError(
            "SGLang names an expert twice for one token, as when its kernels choose experts without recording them; "
            "choose a different rollout.sglang.arguments.moe_runner_backend, or rollout.sglang.routing_replay=false"
        )
    return torch.from_numpy(chosen.astype(np.int16))
