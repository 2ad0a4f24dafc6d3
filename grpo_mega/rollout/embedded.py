"""The embedded engine: samples with a key-value cache from the training weights themselves, under any layout.

No copy of the weights, no synchronisation: what it samples from is what is trained. Prompts are shared out over the
data parallel replicas; a prompt is read once and its cache repeated for the G samples; sequences that have ended make
room for the others. Under pipeline parallelism the last stage samples and tells the stages before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from grpo_mega.policy.attention import KVCache, PackedTokens
from grpo_mega.policy.policy import Policy
from grpo_mega.rollout.engine import SamplingParams
from grpo_mega.rollout.sampling import gumbel_noise, prompt_key, sample_tokens
from grpo_mega.types import Prompt, Sample

Completion = tuple[list[int], list[float], str]
"""Token ids, log-probs, finish reason."""

COMPACT_BELOW = 0.75
"""Ended sequences are dropped from the cache (a copy) once fewer than this share of its rows is alive."""


@dataclass
class Wave:
    """The sequences one replica generates together, [B] = prompts x G, prompt by prompt.

    Attributes:
        prompts: Prompts of this replica in this wave, possibly none.
        keys: [B] noise key of each sequence's prompt.
        samples: [B] index of each sequence in its group.
        limits: [B] most new tokens of each sequence.
        tokens: [B, max_new_tokens] sampled so far.
        logprobs: [B, max_new_tokens] of the sampled tokens.
        lengths: [B] tokens sampled so far.
        stopped: [B] whether a stop token was sampled.
    """

    prompts: Sequence[Prompt]
    keys: torch.Tensor
    samples: torch.Tensor
    limits: torch.Tensor
    tokens: torch.Tensor
    logprobs: torch.Tensor
    lengths: torch.Tensor
    stopped: torch.Tensor

    def completions(self) -> list[Completion]:
        """One per sequence."""
        result = []
        for i, length in enumerate(self.lengths.tolist()):
            reason = "stop" if self.stopped[i] else "length"
            result.append((self.tokens[i, :length].tolist(), self.logprobs[i, :length].tolist(), reason))
        return result


class EmbeddedEngine:
    """Generates with the policy's own weights."""

    def __init__(self, policy: Policy, decode: Callable[[Sequence[int]], str], concurrent_sequences: int) -> None:
        self.policy = policy
        self.decode = decode
        self.concurrent_sequences = concurrent_sequences

    @torch.no_grad()
    def generate(self, prompts: list[Prompt], group_size: int, sampling: SamplingParams, version: int) -> list[Sample]:
        """See `Engine.generate`."""
        topology = self.policy.topology
        per_wave = max(1, self.concurrent_sequences // group_size)
        # Every replica has as many waves as the fullest one, because experts may be spread over replicas.
        waves = -(-len(prompts) // (per_wave * topology.dp_size))

        def complete(mine: Sequence[Prompt]) -> list[list[Completion]]:
            done: list[Completion] = []
            for w in range(waves):
                wave = self._start_wave(mine[w * per_wave : (w + 1) * per_wave], group_size, sampling)
                self._generate_wave(wave, group_size, sampling, version)
                done += wave.completions()
            return [done[i : i + group_size] for i in range(0, len(done), group_size)]

        groups = zip(prompts, topology.spread(prompts, complete), strict=True)
        return [self._sample(p, g, completion, version) for p, group in groups for g, completion in enumerate(group)]

    def _sample(self, prompt: Prompt, index: int, completion: Completion, version: int) -> Sample:
        tokens, logprobs, reason = completion
        text = self.decode(tokens)
        return Sample(prompt, index, tuple(tokens), tuple(logprobs), reason, version, text)

    def _start_wave(self, prompts: Sequence[Prompt], group_size: int, sampling: SamplingParams) -> Wave:
        device = self.policy.platform.device
        room = [min(sampling.max_new_tokens, self.policy.context - len(p.token_ids)) for p in prompts]
        count = len(prompts) * group_size
        return Wave(
            prompts=prompts,
            keys=torch.tensor([prompt_key(p.id) for p in prompts], dtype=torch.int64).repeat_interleave(group_size).to(device),
            samples=torch.arange(group_size).repeat(len(prompts)).to(device),
            limits=torch.tensor(room, dtype=torch.int64).repeat_interleave(group_size).to(device),
            tokens=torch.zeros(count, sampling.max_new_tokens, dtype=torch.int64, device=device),
            logprobs=torch.zeros(count, sampling.max_new_tokens, device=device),
            lengths=torch.zeros(count, dtype=torch.int64, device=device),
            stopped=torch.zeros(count, dtype=torch.bool, device=device),
        )

    def _generate_wave(self, wave: Wave, group_size: int, sampling: SamplingParams, version: int) -> None:
        stop = torch.tensor(sampling.stop_ids, device=wave.tokens.device)
        cache, hidden = self._read_prompts(wave, group_size, sampling)
        rows = torch.arange(len(wave.keys), device=wave.tokens.device)  # sequences in the cache
        prompt_lengths = torch.tensor([len(p.token_ids) for p in wave.prompts], dtype=torch.int64, device=rows.device)
        positions = prompt_lengths.repeat_interleave(group_size)  # of the token about to be sampled
        alive = torch.ones_like(rows, dtype=torch.bool)
        for t in range(sampling.max_new_tokens):
            tokens, logprobs = self._sample_row(wave, rows, hidden, t, sampling, version)
            now = rows[alive]
            wave.tokens[now, t], wave.logprobs[now, t] = tokens[alive], logprobs[alive]
            wave.lengths[now] += 1
            wave.stopped[now] = torch.isin(tokens[alive], stop)
            alive = alive & ~wave.stopped[rows] & (wave.lengths[rows] < wave.limits[rows])
            if not self.policy.topology.any_expert_peer(bool(alive.any()), rows.device):
                return
            if alive.sum() < COMPACT_BELOW * len(rows):
                kept = alive.nonzero()[:, 0]
                cache.keep(kept)
                rows, tokens, positions, alive = rows[kept], tokens[kept], positions[kept], alive[kept]
            # An ended sequence that is still in the cache overwrites its own last place.
            packed = PackedTokens.one_each(positions, self.policy.topology.tp_size, cache)
            hidden = self._hidden(tokens, packed)
            positions = positions + alive

    def _read_prompts(
        self, wave: Wave, group_size: int, sampling: SamplingParams
    ) -> tuple[KVCache, torch.Tensor | None]:
        """Fills a cache with the prompts, repeated per sample; the hidden state that predicts each first token."""
        device = wave.tokens.device
        lengths = torch.tensor([len(p.token_ids) for p in wave.prompts], dtype=torch.int64, device=device)
        longest = int(lengths.max()) if len(lengths) else 0
        cache = KVCache(capacity=min(self.policy.context, longest + sampling.max_new_tokens))
        packed = PackedTokens.of_lengths(lengths, self.policy.topology.tp_size, cache)
        flat = torch.tensor([t for p in wave.prompts for t in p.token_ids], dtype=torch.int64, device=device)
        hidden = self._hidden(flat, packed)
        repeat = torch.arange(len(wave.prompts), device=device).repeat_interleave(group_size)
        cache.keep(repeat)
        last = lengths.cumsum(0) - 1
        return cache, None if hidden is None else hidden[last][repeat]

    def _hidden(self, tokens: torch.Tensor, packed: PackedTokens) -> torch.Tensor | None:
        padded = torch.nn.functional.pad(tokens, (0, packed.padding))
        hidden = self.policy.hidden_states(padded, packed)
        return None if hidden is None else hidden[: len(tokens)]

    def _sample_row(
        self, wave: Wave, rows: torch.Tensor, hidden: torch.Tensor | None, t: int, sampling: SamplingParams, version: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The next token of every cached sequence and its log-prob, on every stage."""
        result = torch.zeros(2, len(rows), dtype=torch.float64, device=rows.device)
        if hidden is not None and len(rows):
            logits = self.policy.head.full_logits(hidden)
            noise = None
            if sampling.temperature > 0:
                steps = torch.full_like(rows, t)
                noise = gumbel_noise(sampling.seed, version, wave.keys[rows], wave.samples[rows], steps, logits.shape[-1])
            tokens, logprobs = sample_tokens(
                logits, noise, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
            )
            result = torch.stack([tokens.double(), logprobs.double()])
        self.policy.topology.from_last_stage(result)
        return result[0].long(), result[1].float()
