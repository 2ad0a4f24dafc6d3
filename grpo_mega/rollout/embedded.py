"""The embedded engine: samples with a key-value cache from the training weights themselves, under any layout.

No copy of the weights, no synchronisation: what it samples from is what is trained. Prompts are shared out over the
data parallel replicas; a prompt is read once and its cache repeated for the G samples; sequences that have ended make
room for the others. Under pipeline parallelism the last stage samples and tells the stages before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from grpo_mega.models.megatron.packed import KVCache, PackedTokens
from grpo_mega.models.policy import Policy
from grpo_mega.platform.stop import Interrupted
from grpo_mega.rollout.contract import Contract, EngineError, Spec
from grpo_mega.rollout.engine import STEPS_PER_POLL, SamplingParams, by_prompt, without_stop
from grpo_mega.rollout.pool import Pool, Wanted
from grpo_mega.rollout.producer import generate
from grpo_mega.rollout.sampling import gumbel_noise, prompt_key, sample_tokens
from grpo_mega.types import Prompt, Sample, pack_tokens
from grpo_mega.weights.names import Entry, entries
from grpo_mega.weights.stream import held_parts

Completion = tuple[int, list[int], list[float], str]
"""Number of the sample, token ids, log-probs, finish reason."""

COMPACT_BELOW = 0.75
"""Ended sequences are dropped from the cache (a copy) once fewer than this share of its rows is alive."""


class Plan(NamedTuple):
    """A wave to be: the samples that one replica generates together.

    Attributes:
        groups: The samples, those of one prompt in each.
        numbers: The number of each sample, group by group.
        sampling: How to sample.
        version: Policy version.
    """

    groups: list[list[Wanted]]
    numbers: list[int]
    sampling: SamplingParams
    version: int


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
        return Sample(prompt, index, tuple(tokens), tuple(logprobs), reason, version, text)

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


class Wave:
    """The B samples of some prompts that one replica generates together, prompt by prompt; possibly none.

    A sequence is a row of the [B, ...] tensors for good; `rows` says which of them are in the cache at the moment, and
    `hidden`, `positions` and `alive` follow the rows of the cache.
    """

    def __init__(self, policy: Policy, plan: Plan) -> None:
        """Reads the prompts."""
        self.policy = policy
        self.prompts = prompts = [group[0][0] for group in plan.groups]
        self.numbers = plan.numbers
        self.sampling = sampling = plan.sampling
        self.version = plan.version
        self.step = 0
        self.ended = False  # here and on the ranks that share experts with this one
        self.repeats = self._per_prompt([len(group) for group in plan.groups])  # samples of each prompt
        lengths = self._per_prompt([len(p.token_ids) for p in prompts])
        limits = (policy.context - lengths).clamp(max=sampling.max_new_tokens)
        self.limits = limits.repeat_interleave(self.repeats)  # [B] most new tokens
        self.keys = self._per_prompt([prompt_key(p.id) for p in prompts]).repeat_interleave(self.repeats)
        self.indices = self._per_prompt([index for group in plan.groups for _, index in group])
        self.rows = torch.arange(len(self.keys), device=lengths.device)
        self.tokens = torch.zeros(len(self.rows), sampling.max_new_tokens, dtype=torch.int64, device=lengths.device)
        self.logprobs = torch.zeros_like(self.tokens, dtype=torch.float32)
        self.counts = torch.zeros_like(self.rows)  # [B] tokens sampled so far
        self.stopped = torch.zeros_like(self.rows, dtype=torch.bool)  # [B] a stop token was sampled
        self.alive = torch.ones_like(self.rows, dtype=torch.bool)
        self.taken = torch.zeros_like(self.rows, dtype=torch.bool)  # [B] see `take`
        self.prompt_lengths = lengths
        self.positions = lengths.repeat_interleave(self.repeats)  # of the token about to be sampled
        self._read_prompts()

    def advance(self, steps: int) -> None:
        """Draws up to so many tokens of every sequence that has not ended, until all have.

        Ranks that share experts with this one advance in lock-step, and end together.
        """
        for _ in range(steps):
            tokens, logprobs = self._sample()
            self._record(tokens, logprobs)
            self.step += 1
            self.ended = not self.policy.topology.any_expert_peer(bool(self.alive.any()), self.rows.device)
            if self.ended:
                break
            if self.alive.sum() < COMPACT_BELOW * len(self.rows):
                tokens = self._compact(tokens)
            self._decode(tokens)

    def take(self, everything: bool) -> list[Completion]:
        """The sequences that have ended, or `everything`, but for those that were taken before."""
        due = ~self.taken if everything else ~self.taken & (self.stopped | (self.counts >= self.limits))
        self.taken |= due
        rows = due.nonzero()[:, 0]
        columns = (self.tokens, self.logprobs, self.counts, self.limits, self.stopped)
        return [
            (self.numbers[row], tokens[:n], logprobs[:n], "stop" if stop else "length" if n == limit else "abort")
            for row, tokens, logprobs, n, limit, stop in zip(
                rows.tolist(), *(column[rows].tolist() for column in columns), strict=True
            )
        ]

    def _read_prompts(self) -> None:
        """Fills the cache with each prompt once and repeats it per sample."""
        longest = int(self.prompt_lengths.max()) if len(self.prompts) else 0
        self.cache = KVCache(capacity=min(self.policy.context, longest + self.sampling.max_new_tokens))
        packed = PackedTokens.of_sequences(self.prompt_lengths, self.policy.topology.row_multiple, self.cache)
        hidden = self._hidden(self._per_prompt([token for p in self.prompts for token in p.token_ids]), packed)
        repeated = torch.arange(len(self.prompts), device=self.rows.device).repeat_interleave(self.repeats)
        self.cache.keep(repeated)
        self.hidden = None if hidden is None else hidden[self.prompt_lengths.cumsum(0) - 1][repeated]

    def _sample(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The next token of every cached sequence and its log-prob, on every stage."""
        sampling = self.sampling
        drawn = torch.zeros(2, len(self.rows), dtype=torch.float64, device=self.rows.device)
        if self.hidden is not None and len(self.rows):
            logits = self.policy.head.full_logits(self.hidden)
            noise = None
            if sampling.temperature > 0:
                keys, indices = self.keys[self.rows], self.indices[self.rows]
                places = torch.full_like(indices, self.step)
                noise = gumbel_noise(sampling.seed, self.version, keys, indices, places, logits.shape[-1])
            tokens, logprobs = sample_tokens(
                logits, noise, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
            )
            drawn = torch.stack([tokens.double(), logprobs.double()])
        self.policy.topology.from_last_stage(drawn)
        return drawn[0].long(), drawn[1].float()

    def _record(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Notes what the living sequences got, and which of them end with it."""
        now, stop = self.rows[self.alive], torch.tensor(self.sampling.stop_ids, device=tokens.device)
        self.tokens[now, self.step], self.logprobs[now, self.step] = tokens[self.alive], logprobs[self.alive]
        self.counts[now] += 1
        self.stopped[now] = torch.isin(tokens[self.alive], stop)
        self.alive &= ~self.stopped[self.rows] & (self.counts[self.rows] < self.limits[self.rows])

    def _compact(self, tokens: torch.Tensor) -> torch.Tensor:
        """Keeps only living sequences in the cache; their tokens."""
        kept = self.alive.nonzero()[:, 0]
        self.cache.keep(kept)
        self.rows, self.positions, self.alive = self.rows[kept], self.positions[kept], self.alive[kept]
        return tokens[kept]

    def _decode(self, tokens: torch.Tensor) -> None:
        """Reads one token per cached sequence; one that has ended overwrites its own last place for nothing."""
        packed = PackedTokens.one_each(self.positions, self.policy.topology.row_multiple, self.cache)
        self.hidden = self._hidden(tokens, packed)
        self.positions = self.positions + self.alive

    def _hidden(self, tokens: torch.Tensor, packed: PackedTokens) -> torch.Tensor | None:
        hidden = self.policy.hidden_states(F.pad(tokens, (0, packed.padding)), packed)
        return None if hidden is None else hidden[: len(tokens)]

    def _per_prompt(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self.policy.platform.device)
