"""The embedded engine: samples with a key-value cache from the training weights themselves, under any layout.

No copy of the weights, no synchronisation: what it samples from is what is trained. Prompts are shared out over the
data parallel replicas; a prompt is read once and its cache repeated for the G samples; sequences that have ended make
room for the others. Under pipeline parallelism the last stage samples and tells the stages before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
import torch.nn.functional as F

from grpo_mega.models.megatron.packed import KVCache, PackedTokens
from grpo_mega.models.policy import Policy
from grpo_mega.platform.stop import Interrupted
from grpo_mega.rollout.contract import Contract, EngineError, Spec
from grpo_mega.rollout.engine import STEPS_BETWEEN_QUESTIONS, SamplingParams, without_stop
from grpo_mega.rollout.sampling import gumbel_noise, prompt_key, sample_tokens
from grpo_mega.types import Prompt, Sample, pack_tokens
from grpo_mega.weights.names import Entry, entries
from grpo_mega.weights.stream import held_parts

Completion = tuple[list[int], list[float], str]
"""Token ids, log-probs, finish reason."""

COMPACT_BELOW = 0.75
"""Ended sequences are dropped from the cache (a copy) once fewer than this share of its rows is alive."""


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
        self._aborted = False

    @property
    def version(self) -> int | None:
        """Policy version of the last push; None before the first one, or behind a release."""
        return self._contract.version

    @torch.no_grad()
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
            Interrupted: `interrupted` held on some rank before its replica had finished.
        """
        with self._contract.generating(version):
            self._aborted = False
            return self._generate(prompts, group_size, sampling, version, interrupted)

    def _generate(
        self,
        prompts: list[Prompt],
        group_size: int,
        sampling: SamplingParams,
        version: int,
        interrupted: Callable[[], bool] | None,
    ) -> list[Sample]:
        topology = self.policy.topology
        per_wave = max(1, self.concurrent_sequences // group_size)
        # Every replica has as many waves as the fullest one, because experts may be spread over replicas.
        waves = -(-len(prompts) // (per_wave * topology.scorers))

        def complete(mine: Sequence[Prompt]) -> list[list[Completion] | None]:
            done: list[Completion] = []
            for w in range(waves):
                wave = Wave(self.policy, mine[w * per_wave : (w + 1) * per_wave], group_size, sampling, version)
                if not wave.run(interrupted, lambda: self._aborted):
                    return [None] * len(mine)
                done += wave.completions()
            return [done[i : i + group_size] for i in range(0, len(done), group_size)]

        groups = [group for group in topology.spread(prompts, complete) if group is not None]
        if len(groups) < len(prompts):
            raise Interrupted
        return [
            Sample(
                prompt,
                index,
                tuple(tokens),
                tuple(logprobs),
                reason,
                version,
                self.decode(without_stop(tokens, reason)),
            )
            for prompt, group in zip(prompts, groups, strict=True)
            for index, (tokens, logprobs, reason) in enumerate(group)
        ]

    def scores(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """Log-prob of every token but the first."""
        with self._contract.generating(version=None):
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
        """Notes it: the engine has no memory of its own outside of `generate`."""
        self._contract.release(tags)

    def resume(self, tags: Collection[str]) -> None:
        """Notes it."""
        self._contract.resume(tags)

    def abort(self) -> None:
        """Ends the generation in progress; see `Engine`."""
        self._aborted = True

    def pids(self) -> list[int]:
        """None."""
        return []

    def close(self) -> None:
        """Does nothing: there are no processes to end."""

    def _entries(self) -> list[Entry]:
        return entries(self.policy.architecture, self.policy.vocab_size)


class Wave:
    """The B = prompts x G sequences one replica generates together, prompt by prompt; possibly none.

    A sequence is a row of the [B, ...] tensors for good; `rows` says which of them are in the cache at the moment, and
    `hidden`, `positions` and `alive` follow the rows of the cache.
    """

    def __init__(
        self, policy: Policy, prompts: Sequence[Prompt], group_size: int, sampling: SamplingParams, version: int
    ) -> None:
        self.policy = policy
        self.prompts = prompts
        self.group_size = group_size
        self.sampling = sampling
        self.version = version
        lengths = self._per_prompt([len(p.token_ids) for p in prompts])
        limits = (policy.context - lengths).clamp(max=sampling.max_new_tokens)
        self.limits = limits.repeat_interleave(group_size)  # [B] most new tokens
        self.keys = self._per_prompt([prompt_key(p.id) for p in prompts]).repeat_interleave(group_size)
        self.indices = self._per_prompt(range(group_size)).repeat(len(prompts))
        self.rows = torch.arange(len(self.keys), device=lengths.device)
        self.tokens = torch.zeros(len(self.rows), sampling.max_new_tokens, dtype=torch.int64, device=lengths.device)
        self.logprobs = torch.zeros_like(self.tokens, dtype=torch.float32)
        self.counts = torch.zeros_like(self.rows)  # [B] tokens sampled so far
        self.stopped = torch.zeros_like(self.rows, dtype=torch.bool)  # [B] a stop token was sampled
        self.alive = torch.ones_like(self.rows, dtype=torch.bool)
        self.prompt_lengths = lengths
        self.positions = lengths.repeat_interleave(group_size)  # of the token about to be sampled

    def run(self, interrupted: Callable[[], bool] | None, aborted: Callable[[], bool]) -> bool:
        """Generates until every sequence has ended, here and on the ranks that share experts with this one.

        A rank in lock-step that is `aborted` ends it early. False when one is `interrupted`, and it was given up.
        """
        self._read_prompts()
        for step in range(self.sampling.max_new_tokens):
            if step % STEPS_BETWEEN_QUESTIONS == 0:
                if interrupted is not None and self._any_in_lock_step(interrupted()):
                    return False
                if self._any_in_lock_step(aborted()):
                    break
            tokens, logprobs = self._sample(step)
            self._record(step, tokens, logprobs)
            if not self.policy.topology.any_expert_peer(bool(self.alive.any()), self.rows.device):
                break
            if self.alive.sum() < COMPACT_BELOW * len(self.rows):
                tokens = self._compact(tokens)
            self._decode(tokens)
        return True

    def _any_in_lock_step(self, value: bool) -> bool:
        return self.policy.topology.any_in_lock_step(value, self.rows.device)

    def completions(self) -> list[Completion]:
        """One per sequence."""
        rows = (self.tokens, self.logprobs, self.counts, self.limits, self.stopped)
        return [
            (tokens[:n], logprobs[:n], "stop" if stop else "length" if n == limit else "abort")
            for tokens, logprobs, n, limit, stop in zip(*(row.tolist() for row in rows), strict=True)
        ]

    def _read_prompts(self) -> None:
        """Fills the cache with each prompt once and repeats it per sample."""
        longest = int(self.prompt_lengths.max()) if len(self.prompts) else 0
        self.cache = KVCache(capacity=min(self.policy.context, longest + self.sampling.max_new_tokens))
        packed = PackedTokens.of_sequences(self.prompt_lengths, self.policy.topology.row_multiple, self.cache)
        hidden = self._hidden(self._per_prompt([token for p in self.prompts for token in p.token_ids]), packed)
        repeated = torch.arange(len(self.prompts), device=self.rows.device).repeat_interleave(self.group_size)
        self.cache.keep(repeated)
        self.hidden = None if hidden is None else hidden[self.prompt_lengths.cumsum(0) - 1][repeated]

    def _sample(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The next token of every cached sequence and its log-prob, on every stage."""
        sampling = self.sampling
        drawn = torch.zeros(2, len(self.rows), dtype=torch.float64, device=self.rows.device)
        if self.hidden is not None and len(self.rows):
            logits = self.policy.head.full_logits(self.hidden)
            noise = None
            if sampling.temperature > 0:
                keys, indices = self.keys[self.rows], self.indices[self.rows]
                places = torch.full_like(indices, step)
                noise = gumbel_noise(sampling.seed, self.version, keys, indices, places, logits.shape[-1])
            tokens, logprobs = sample_tokens(
                logits, noise, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
            )
            drawn = torch.stack([tokens.double(), logprobs.double()])
        self.policy.topology.from_last_stage(drawn)
        return drawn[0].long(), drawn[1].float()

    def _record(self, step: int, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Notes what the living sequences got, and which of them end with it."""
        now, stop = self.rows[self.alive], torch.tensor(self.sampling.stop_ids, device=tokens.device)
        self.tokens[now, step], self.logprobs[now, step] = tokens[self.alive], logprobs[self.alive]
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
