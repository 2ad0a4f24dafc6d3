"""State machine shared by all engines: which weights an engine has, and which calls are legal when.

Bookkeeping only. An engine reports every call to its contract before it acts, so that all engines refuse the same calls
with the same messages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import NamedTuple

import torch

TAGS = ("weights", "kv_cache", "cuda_graph")
"""Kinds of an engine's memory; each can be released and resumed separately."""


class Spec(NamedTuple):
    """Expected shape and dtype of a weight."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class EngineError(RuntimeError):
    """A call that is not possible now, or at which the engine failed."""


class EngineRestarted(EngineError):
    """An engine was lost and has been restarted; all engines of the job wait for weights, and no samples are under way.

    Push the weights, then resubmit the samples that were not handed out. A `Stream` does so when it is called again,
    and keeps the finished samples.
    """


class Contract:
    """State of one engine, the same on every rank except for the weights that a rank is to push.

    Where ranks push different weights they have to agree first that none of them refuses; the methods named `check_`
    refuse without changing the state.
    """

    def __init__(self, expected: Callable[[], Mapping[str, Spec]], has_weights: bool) -> None:
        """The state of a new engine.

        Args:
            expected: Weights that this rank is to push, by name.
            has_weights: Whether the engine can generate before weights were pushed.
        """
        self._pushed: int | None = None
        self._expected = expected
        self._ready = has_weights
        self._due: dict[str, Spec] | None = None
        self._released: set[str] = set()
        self.under_way = 0
        """Number of samples that were submitted, and neither handed out nor dropped."""

    @property
    def version(self) -> int | None:
        """Policy version of the engine's weights; None when none were pushed, or they were released."""
        return self._pushed if self._ready else None

    def begin_update(self) -> None:
        """Begins a session of pushes; nothing can be generated until it ends."""
        self._refuse_while_generating("begin_update")
        if self._due is not None:
            raise EngineError("begin_update: a weight update is open already; end it with end_update")
        if "weights" in self._released:
            raise EngineError("begin_update: the memory of the weights is released; resume(['weights']) first")
        self._due, self._ready = dict(self._expected()), False

    def check_push(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Raises EngineError for a bucket in which a weight is unknown, repeated or of another shape or dtype."""
        due = self._session("push")
        names = [name for name, _ in bucket]
        for name, tensor in bucket:
            if name not in due:
                expected = self._expected()
                if name in expected:
                    raise EngineError(f"push: {name} was already pushed in this update")
                close = get_close_matches(name, expected, n=1)
                meant = f"; did you mean {close[0]}?" if close else ""
                raise EngineError(f"push: no tensor {name} is expected here{meant}")
            if names.count(name) > 1:
                raise EngineError(f"push: {name} is in the bucket more than once")
            pushed = Spec(tuple(tensor.shape), tensor.dtype)
            if pushed != due[name]:
                raise EngineError(f"push: {name} is {_described(pushed)}, but the model's is {_described(due[name])}")

    def push(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Records the push of a bucket of weights; raises as `check_push` does."""
        self.check_push(bucket)
        due = self._session("push")
        for name, _ in bucket:
            del due[name]

    def check_end_update(self, version: int) -> None:
        """Raises EngineError while weights are missing, or for an older version than the last one."""
        due = self._session("end_update")
        if due:
            raise EngineError(f"end_update: {len(due)} tensors were not pushed, the first: {next(iter(due))}")
        if self._pushed is not None and version < self._pushed:
            raise EngineError(f"end_update: version {version} is stale, version {self._pushed} was pushed before")

    def end_update(self, version: int) -> None:
        """Ends the session of pushes: the engine has all weights of this policy version."""
        self.check_end_update(version)
        self._pushed, self._due, self._ready = version, None, True

    @property
    def released(self) -> frozenset[str]:
        """Tags whose memory is released."""
        return frozenset(self._released)

    def reset(self, released: Collection[str]) -> None:
        """Resets to the state of a new engine: no weights, no samples under way, and this memory released."""
        self._due, self._ready, self._released, self.under_way = None, False, {*released}, 0

    @property
    def busy(self) -> bool:
        """Whether samples are under way: submitted, and neither handed out nor dropped."""
        return self.under_way > 0

    def submit(self, version: int, samples: int) -> None:
        """Adds samples under way, with the weights of `version`; legal while others are under way."""
        self._refuse_without_weights("submit")
        if self.version not in (version, None):
            raise EngineError(f"submit: version {version} is requested, but the engine has version {self.version}")
        self.under_way += samples

    def poll(self) -> None:
        """Raises EngineError when no samples are under way."""
        if not self.busy:
            raise EngineError("poll: no sample is under way; submit some first")

    def hand_out(self, samples: int) -> None:
        """Records that samples were handed to the caller, and are no longer under way."""
        self.under_way -= samples

    def drop(self) -> None:
        """Drops all samples under way: they will not be handed out."""
        self.under_way = 0

    def scores(self) -> None:
        """Raises EngineError where `submit` would, and while samples are under way."""
        self._refuse_while_generating("scores")
        self._refuse_without_weights("scores")

    def release(self, tags: Collection[str]) -> None:
        """Records that memory is released; weights are undefined afterwards."""
        self._refuse_while_generating("release")
        self._refuse_tags("release", tags, self._released, "is released already")
        if self._due is not None:
            raise EngineError("release: a weight update is open; end it with end_update")
        self._released |= {*tags}
        if "weights" in tags:
            self._ready = False

    def resume(self, tags: Collection[str]) -> None:
        """Records that released memory is resumed."""
        self._refuse_tags("resume", tags, {*TAGS} - self._released, "was not released")
        self._released -= {*tags}

    def _session(self, call: str) -> dict[str, Spec]:
        if self._due is None:
            raise EngineError(f"{call}: no weight update is open; call begin_update first")
        return self._due

    def _refuse_while_generating(self, call: str) -> None:
        if self.busy:
            raise EngineError(f"{call}: the engine is generating; poll for its samples first")

    def _refuse_without_weights(self, call: str) -> None:
        if self._due is not None:
            raise EngineError(f"{call}: a weight update is open; end it with end_update")
        if self._released:
            released = " and ".join(tag for tag in TAGS if tag in self._released)
            raise EngineError(f"{call}: the memory of {released} is released; resume it first")
        if not self._ready:
            raise EngineError(f"{call}: the engine has no weights, or undefined ones; push all of them first")

    def _refuse_tags(self, call: str, tags: Collection[str], wrong: Collection[str], why: str) -> None:
        for tag in tags:
            if tag not in TAGS:
                raise EngineError(f"{call}: unknown kind of memory {tag!r}; choose among {', '.join(TAGS)}")
            if tag in wrong:
                raise EngineError(f"{call}: the memory of {tag} {why}")


def _described(spec: Spec) -> str:
    return f"{list(spec.shape)} {str(spec.dtype).removeprefix('torch.')}"
