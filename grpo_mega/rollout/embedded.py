"""The embedded engine: samples with a key-value cache from the training weights themselves, under any layout.

The weights are neither copied nor synchronised: the engine samples from those that are trained. Prompts are split
between the data parallel replicas, each of which generates a wave (`wave.py`) of at most as many samples at once as
configured. All tensor and pipeline parallel ranks of a replica see every token, and hold the samples round-robin.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection, Sequence

import torch

from grpo_mega.models.policy import Policy
from grpo_mega.platform.stop import Interrupted
from grpo_mega.rollout.contract import Contract, EngineError, Spec
from grpo_mega.rollout.engine import (
    STEPS_PER_POLL,
    Finished,
    SamplingParams,
    Wanted,
    by_prompt,
    round_robin,
)
from grpo_mega.rollout.wave import Plan, Wave, WaveCompletion
from grpo_mega.types import pack_tokens
from grpo_mega.weights.merging import parts_of
from grpo_mega.weights.names import NamedTensor, entries


class EmbeddedEngine:
    """Generates with the policy's weights themselves; see `Engine`.

    A push is compared with the training weights and copies nothing; before the first push every version is accepted.
    """

    experts_of = None
    generates_between_polls = False

    def __init__(self, policy: Policy, decode: Callable[[Sequence[int]], str], concurrent_sequences: int) -> None:
        """`decode` converts token ids to text; at most `concurrent_sequences` are generated at once per replica."""
        self.policy = policy
        self.decode = decode
        self.concurrent_sequences = concurrent_sequences
        self._contract = Contract(lambda: {e.name: Spec(e.shape, e.dtype) for e in self._entries()}, has_weights=True)
        self._plans: deque[Plan] = deque()
        self._wave: Wave | None = None
        # Number of samples of this replica that its ranks have received; the round-robin goes on from poll to poll.
        self._distributed = 0

    @property
    def version(self) -> int | None:
        """Policy version of the last push; None before the first one, or after a release."""
        return self._contract.version

    @property
    def busy(self) -> bool:
        """Whether samples are under way."""
        return self._contract.busy

    def submit(self, wanted: Sequence[Wanted], sampling: SamplingParams, version: int) -> None:
        """Plans the waves that generate these samples; see `Engine`."""
        self._contract.submit(version, len(wanted))
        groups = by_prompt(wanted)
        # Every replica has as many waves as the fullest one, even if some are empty: experts may be spread over
        # replicas, which then generate in lock-step. A group is never split, so that its prefix is read once.
        topology = self.policy.topology
        largest = max(map(len, groups), default=1)
        # Groups that all replicas together generate at once. `share` gives each replica its part, even if that is none.
        together = max(1, self.concurrent_sequences // largest) * topology.scorers
        for first in range(0, len(groups), together):
            self._plans.append(Plan([*topology.share(groups[first : first + together])], sampling, version))

    @torch.no_grad()
    def poll(self, interrupted: bool = False) -> Finished:
        """Draws up to `STEPS_PER_POLL` tokens of each sequence of a wave; see `Engine`."""
        self._contract.poll()
        topology = self.policy.topology
        try:
            ended = self._advance(interrupted)
            held = round_robin(ended, *topology.model_parallel_rank_and_size, self._distributed)
            (everywhere,) = topology.sum_over_ranks([len(held)], self.policy.platform.device)
        # As promised by `Engine.poll`, no sample is under way after any error.
        except BaseException:
            self._wave = None
            self._plans.clear()
            self._contract.drop()
            raise
        self._distributed += len(ended)
        self._contract.hand_out(everywhere)
        samples = []
        for wanted, version, tokens, logprobs, reason in held:
            ids, floats = array("i", tokens.numpy().tobytes()), array("f", logprobs.numpy().tobytes())
            samples.append(wanted.sample(ids, floats, reason, version, self.decode))
        return Finished(samples, everywhere)

    def _advance(self, interrupted: bool) -> list[WaveCompletion]:
        """Samples of this replica that end during a poll."""
        if any(self.policy.topology.sum_over_ranks([interrupted], self.policy.platform.device)):
            raise Interrupted
        # Nothing is left here, but other replicas still have samples, and every rank polls until all are handed out.
        if not (self._wave or self._plans):
            return []
        wave = self._wave or Wave(self.policy, self._plans.popleft())
        wave.advance(STEPS_PER_POLL)
        self._wave = None if wave.ended else wave
        return wave.take()

    def scores(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """Log-prob of every token but the first, under the policy; see `Engine`."""
        self._contract.scores()
        return {"engine 0": self.policy.logprobs(pack_tokens([token_ids], [1]), temperature=1.0)[1:].tolist()}

    def begin_update(self) -> None:
        """Opens a session of pushes."""
        self._contract.begin_update()

    def push(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Compares the tensors with the shards that this rank trains.

        Raises:
            EngineError: As in `Engine`; or a tensor differs from the trained one.
        """
        self._contract.push(bucket)
        parts, tensors = parts_of(self.policy, self._entries()), dict(bucket)
        # A rank holds only parts of most tensors; each part is compared with its slice of the pushed tensor.
        for entry in self._entries():
            for box in parts.held.get(entry.key, ()) if entry.name in tensors else ():
                for source, target in entry.overlap(box):
                    if not torch.equal(entry.outwards(parts.merged(entry, box, source)), tensors[entry.name][target]):
                        raise EngineError(f"push: {entry.name} differs from the tensor that is trained; is it stale?")

    def end_update(self, version: int) -> None:
        """Closes the session."""
        self._contract.end_update(version)

    def release(self, tags: Collection[str]) -> None:
        """Records a release of memory; the engine holds none when no samples are under way."""
        self._contract.release(tags)

    def resume(self, tags: Collection[str]) -> None:
        """Records that memory is resumed."""
        self._contract.resume(tags)

    def metrics(self) -> dict[str, float]:
        """Nothing: tokens are read again by every wave."""
        return {}

    def pids(self) -> list[int]:
        """An empty list: the engine runs in the process of the rank."""
        return []

    def close(self) -> None:
        """Does nothing: the engine has no processes to end."""

    def _entries(self) -> list[NamedTensor]:
        return entries(self.policy.architecture, self.policy.vocab_size)
