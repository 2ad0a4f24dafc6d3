"""The embedded engine: samples with a key-value cache from the training weights themselves, under any layout.

No copy of the weights, no synchronisation: what it samples from is what is trained. Prompts are shared out over the
data parallel replicas, each of which generates as many at once as memory allows: a wave (`wave.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

import torch

from grpo_mega.models.policy import Policy
from grpo_mega.platform.stop import Interrupted
from grpo_mega.rollout.contract import Contract, EngineError, Spec
from grpo_mega.rollout.engine import STEPS_PER_POLL, SamplingParams, by_prompt, without_stop
from grpo_mega.rollout.pool import Pool, Wanted
from grpo_mega.rollout.producer import generate
from grpo_mega.rollout.wave import Completion, Plan, Wave
from grpo_mega.types import Prompt, Sample, pack_tokens
from grpo_mega.weights.names import Entry, entries
from grpo_mega.weights.stream import held_parts


class EmbeddedEngine:
    """Generates with the policy's own weights; see `Engine`.

    A push is compared with these weights and copies nothing; before the first one every version may be asked for.
    """

    experts_of = None

    def __init__(self, policy: Policy, decode: Callable[[Sequence[int]], str], concurrent_sequences: int) -> None:
        """`decode` turns token ids into text; at most `concurrent_sequences` are generated at once per replica."""
        self.policy = policy
        self.decode = decode
        self.concurrent_sequences = concurrent_sequences
        self._contract = Contract(lambda: {e.name: Spec(e.shape, e.dtype) for e in self._entries()}, has_weights=True)
        self._submitted = 0
        self._under_way: dict[int, tuple[Prompt, int, int]] = {}  # number -> prompt, index, version
        self._plans: deque[Plan] = deque()
        self._wave: Wave | None = None
        self._aborted = False

    @property
    def version(self) -> int | None:
        """Policy version of the last push; None before the first one, or after a release."""
        return self._contract.version

    @property
    def busy(self) -> bool:
        """Whether samples are under way."""
        return self._contract.busy

    def submit(self, wanted: Sequence[Wanted], sampling: SamplingParams, version: int) -> None:
        """Plans the waves in which these samples are generated; see `Engine`."""
        if not self.busy:
            self._aborted = False
        self._contract.submit(version, len(wanted))
        groups, number = [], self._submitted
        for group in by_prompt(wanted):
            groups.append((group, range(number, number + len(group))))
            number += len(group)
        self._submitted = number
        self._under_way |= {
            number: (*one, version) for group, numbers in groups for number, one in zip(numbers, group, strict=True)
        }
        # Every replica has as many waves as the fullest one, because experts may be spread over replicas.
        topology = self.policy.topology
        largest = max((len(group) for group, _ in groups), default=1)
        together = max(1, self.concurrent_sequences // largest) * topology.scorers
        for first in range(0, len(groups), together):
            mine = topology.share(groups[first : first + together])
            numbers = [number for _, numbers in mine for number in numbers]
            self._plans.append(Plan([group for group, _ in mine], numbers, sampling, version))

    @torch.no_grad()
    def poll(self, interrupted: bool = False) -> list[Sample]:
        """Draws up to `STEPS_PER_POLL` tokens of each sequence of a wave; see `Engine`."""
        self._contract.poll()
        try:
            finished = self.policy.topology.from_all_scorers(self._advance(interrupted))
        except BaseException:
            self._drop()
            raise
        samples = [
            self._sample(*completion) for completion in sorted(completion for part in finished for completion in part)
        ]
        self._contract.hand_out(len(samples))
        return samples

    def abort(self) -> None:
        """Ends all that is under way, at the next poll; see `Engine`."""
        self._aborted = True

    def generate(
        self,
        prompts: list[Prompt],
        group_size: int,
        sampling: SamplingParams,
        version: int,
        interrupted: Callable[[], bool] | None = None,
    ) -> list[Sample]:
        """`group_size` samples of every prompt, prompt by prompt; the same list on every rank.

        Raises:
            Interrupted: `interrupted` held on some rank before all was sampled.
        """
        return generate(self, Pool(group_size, prompts), sampling, version, interrupted)

    def _advance(self, interrupted: bool) -> list[Completion]:
        """What ends in this replica during a poll."""
        topology, device = self.policy.topology, self.policy.platform.device
        if aborted := self._aborted:
            self._aborted = False
        if topology.any_rank(interrupted or aborted, device):
            if topology.any_rank(interrupted, device):
                raise Interrupted
            return self._ended()
        if not (self._wave or self._plans):  # other replicas have some left
            return []
        wave = self._wave or Wave(self.policy, self._plans.popleft())
        wave.advance(STEPS_PER_POLL)
        self._wave = None if wave.ended else wave
        return wave.take(everything=False)

    def _ended(self) -> list[Completion]:
        """What this replica has of all samples under way, none of which goes on."""
        finished = self._wave.take(everything=True) if self._wave else []
        finished += [(number, [], [], "abort") for plan in self._plans for number in plan.numbers]
        self._wave = None
        self._plans.clear()
        return finished

    def _drop(self) -> None:
        """Nothing is under way any more."""
        self._wave = None
        self._plans.clear()
        self._under_way.clear()
        self._contract.drop()

    def _sample(self, number: int, tokens: list[int], logprobs: list[float], reason: str) -> Sample:
        """The finished sample of this number, which is under way no more."""
        prompt, index, version = self._under_way.pop(number)
        text = self.decode(without_stop(tokens, reason))
        return Sample(prompt, index, tuple(tokens), tuple(logprobs), reason, ((0, version),), text)

    def scores(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """Log-prob of every token but the first."""
        self._contract.scores()
        return {"engine 0": self.policy.logprobs(pack_tokens([token_ids], [1]), temperature=1.0)[1:].tolist()}

    def begin_update(self) -> None:
        """Opens a session of pushes."""
        self._contract.begin_update()

    def push(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Compares the tensors with the parts of them that this rank trains.

        Raises:
            EngineError: See `Engine`; or a tensor differs from the one that is trained.
        """
        self._contract.push(bucket)
        held, tensors = held_parts(self.policy, self._entries()), dict(bucket)
        for entry in self._entries():
            for box, part in held.get(entry.key, {}).items() if entry.name in tensors else ():
                for source, target in entry.overlap(box):
                    if not torch.equal(part[source], tensors[entry.name][target]):
                        raise EngineError(f"push: {entry.name} differs from the tensor that is trained; is it stale?")

    def end_update(self, version: int) -> None:
        """Closes the session."""
        self._contract.end_update(version)

    def release(self, tags: Collection[str]) -> None:
        """Notes that memory is released; the engine has none of its own when nothing is under way."""
        self._contract.release(tags)

    def resume(self, tags: Collection[str]) -> None:
        """Notes that memory is taken again."""
        self._contract.resume(tags)

    def pids(self) -> list[int]:
        """No processes: it is part of the rank."""
        return []

    def close(self) -> None:
        """Does nothing: there are no processes to end."""

    def _entries(self) -> list[Entry]:
        return entries(self.policy.architecture, self.policy.vocab_size)
