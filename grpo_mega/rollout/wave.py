"""Batch of sequences that a replica generates with the policy's weights and a key-value cache, under any layout.

A prompt is read once and its cache repeated for its samples; a sample that is continued is read again as a whole.
Sequences that have ended are dropped from the cache. Under pipeline parallelism the last stage samples and broadcasts
the tokens to the stages before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from grpo_mega.models.megatron.packed import KVCache, PackedTokens
from grpo_mega.models.policy import Policy
from grpo_mega.rollout.engine import SLICE, SamplingParams, Wanted
from grpo_mega.rollout.sampling import draw_key, gumbel_noise, prompt_key, sample_tokens

COMPACT_BELOW = 0.75
"""Share of alive cache rows below which ended sequences are dropped from the cache. This copies the rest of the cache,
and so it is not done for every sequence that ends."""


class Plan(NamedTuple):
    """Samples that one replica generates together.

    Attributes:
        groups: The samples, grouped by the prefix that they continue.
        sampling: Sampling parameters.
        version: Policy version.
    """

    groups: list[list[Wanted]]
    sampling: SamplingParams
    version: int

    @property
    def wanted(self) -> list[Wanted]:
        """Samples of all groups, in order."""
        return [sample for group in self.groups for sample in group]


class WaveCompletion(NamedTuple):
    """A sample that has ended.

    Attributes:
        wanted: The requested sample.
        version: Policy version that it was sampled with.
        tokens: [C] int32, sampled now; on the CPU.
        logprobs: [C] float32, on the CPU.
        finish_reason: See `Sample`.
    """

    wanted: Wanted
    version: int
    tokens: torch.Tensor
    logprobs: torch.Tensor
    finish_reason: str


class Wave:
    """The B samples that one replica generates together, group by group; possibly none.

    The samples of a group share a prefix: a prompt, or for a single sample that goes on, the tokens that it sees. A
    sequence keeps its row in the [B, ...] tensors; `rows` are those now in the cache, and `hidden`, `positions` and
    `alive` are aligned with the rows of the cache.
    """

    def __init__(self, policy: Policy, plan: Plan) -> None:
        """Reads the prefixes into the cache."""
        self.policy = policy
        self.prefixes = [group[0].prefix for group in plan.groups]
        self.wanted = plan.wanted
        self.sampling = sampling = plan.sampling
        self.version = plan.version
        self.step = 0
        # Whether all sequences have ended, here and on the ranks that share experts with this one.
        self.ended = False
        # Number of samples of each group.
        self.repeats = self._integers([len(group) for group in plan.groups])
        lengths = self._integers(map(len, self.prefixes))
        # [B] largest number of tokens to sample now, and until the sample is finished.
        limits = [one.limits(sampling.max_new_tokens, policy.context) for one in self.wanted]
        self.limits = self._integers([now for now, _ in limits])
        self.finished = self._integers([left for _, left in limits])
        # Counters of the noise. A sample that goes on keeps its draw, and its positions count from its first token, so
        # that it has the same tokens in one piece as in several.
        draws = (sampling.draw if one.draw is None else one.draw for one in self.wanted)
        keys = [
            prompt_key(one.prompt.id) ^ draw_key(sampling.seed, draw)
            for one, draw in zip(self.wanted, draws, strict=True)
        ]
        self.keys = self._integers(keys)
        self.indices = self._integers([one.index for one in self.wanted])
        # [B] position in the completion of the first token that is sampled now.
        self.first = self._integers([len(one.so_far.token_ids) if one.so_far else 0 for one in self.wanted])
        # State of the sequences, updated by `_record` and `_compact`.
        self.rows = torch.arange(len(self.keys), device=lengths.device)
        self.tokens = torch.zeros(len(self.rows), sampling.max_new_tokens, dtype=torch.int64, device=lengths.device)
        self.logprobs = torch.zeros_like(self.tokens, dtype=torch.float32)
        # [B] number of tokens sampled so far, and whether the last one is a stop token.
        self.counts = torch.zeros_like(self.rows)
        self.stopped = torch.zeros_like(self.rows, dtype=torch.bool)
        self.alive = torch.ones_like(self.rows, dtype=torch.bool)
        # [B] whether `take` has returned the sample.
        self.taken = torch.zeros_like(self.rows, dtype=torch.bool)
        self.prefix_lengths = lengths
        # Position of the token about to be sampled.
        self.positions = lengths.repeat_interleave(self.repeats)
        self._read_prefixes()

    def advance(self, steps: int) -> None:
        """Samples up to `steps` tokens of every sequence that has not ended.

        Ranks that share experts with this one advance in lock-step, and end together.
        """
        for _ in range(steps):
            tokens, logprobs = self._sample()
            self._record(tokens, logprobs)
            self.step += 1
            # A rank whose sequences have all ended decodes on, with empty batches: the layers of its expert peers
            # exchange tokens with it in collectives that would otherwise wait for it.
            self.ended = not self.policy.topology.any_expert_peer(bool(self.alive.any()), self.rows.device)
            # The last tokens need not be read: nothing is sampled after them.
            if self.ended:
                break
            if self.alive.sum() < COMPACT_BELOW * len(self.rows):
                tokens = self._compact(tokens)
            # Ended sequences are computed along with the others until `_compact` drops them: their token overwrites the
            # last position, unread. Their positions stay, so that they never run past the capacity of the cache.
            packed = PackedTokens.one_each(self.positions, self.policy.topology.row_multiple, self.cache)
            self.hidden = self._hidden(tokens, packed)
            self.positions = self.positions + self.alive

    def take(self) -> list[WaveCompletion]:
        """Completions of the sequences that have ended, without those taken before."""
        due = ~self.taken & (self.stopped | (self.counts >= self.limits))
        self.taken |= due
        rows = due.nonzero()[:, 0]
        tokens, logprobs = self.tokens[rows].int().cpu(), self.logprobs[rows].cpu()
        columns = (rows, self.counts[rows], self.limits[rows], self.finished[rows], self.stopped[rows])
        ends = zip(*(column.tolist() for column in columns), strict=True)
        return [
            WaveCompletion(
                self.wanted[row],
                self.version,
                row_tokens[:n],
                row_logprobs[:n],
                # In this order, because a stop token may be the last that the limit allows, and the limit for now may
                # be that of the whole sample.
                "stop" if stop else "length" if n == left else SLICE,
            )
            for row_tokens, row_logprobs, (row, n, limit, left, stop) in zip(tokens, logprobs, ends, strict=True)
        ]

    def _read_prefixes(self) -> None:
        """Fills the cache with each prefix once and repeats it per sample."""
        longest = int(self.prefix_lengths.max()) if len(self.prefixes) else 0
        most = int(self.limits.max()) if len(self.limits) else 0
        self.cache = KVCache(capacity=min(self.policy.context, longest + most))
        packed = PackedTokens.of_sequences(self.prefix_lengths, self.policy.topology.row_multiple, self.cache)
        hidden = self._hidden(self._integers([token for prefix in self.prefixes for token in prefix]), packed)
        repeated = torch.arange(len(self.prefixes), device=self.rows.device).repeat_interleave(self.repeats)
        self.cache.keep(repeated)
        # The first token is sampled from the hidden state of a prefix's last token; only the last stage has it.
        self.hidden = None if hidden is None else hidden[self.prefix_lengths.cumsum(0) - 1][repeated]

    def _sample(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Next token of every cached sequence and its log-prob, on every stage."""
        sampling = self.sampling
        # One tensor for both, so that one broadcast is enough; float64 holds token ids and float32 log-probs exactly.
        drawn = torch.zeros(2, len(self.rows), dtype=torch.float64, device=self.rows.device)
        # Only the last stage has hidden states; the broadcast below overwrites the zeros of the others.
        if self.hidden is not None and len(self.rows):
            logits = self.policy.head.full_logits(self.hidden)
            noise = None
            if sampling.temperature > 0:
                keys, indices = self.keys[self.rows], self.indices[self.rows]
                noise = gumbel_noise(keys, indices, self.first[self.rows] + self.step, logits.shape[-1])
            tokens, logprobs = sample_tokens(
                logits, noise, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
            )
            drawn = torch.stack([tokens.double(), logprobs.double()])
        self.policy.topology.from_last_stage(drawn)
        return drawn[0].long(), drawn[1].float()

    def _record(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Stores the tokens of alive sequences, and which of these end with them."""
        now, stop = self.rows[self.alive], torch.tensor(self.sampling.stop_ids, device=tokens.device)
        self.tokens[now, self.step], self.logprobs[now, self.step] = tokens[self.alive], logprobs[self.alive]
        self.counts[now] += 1
        self.stopped[now] = torch.isin(tokens[self.alive], stop)
        self.alive &= ~self.stopped[self.rows] & (self.counts[self.rows] < self.limits[self.rows])

    def _compact(self, tokens: torch.Tensor) -> torch.Tensor:
        """Drops ended sequences from the cache; returns the tokens of the others."""
        kept = self.alive.nonzero()[:, 0]
        self.cache.keep(kept)
        self.rows, self.positions, self.alive = self.rows[kept], self.positions[kept], self.alive[kept]
        return tokens[kept]

    def _hidden(self, tokens: torch.Tensor, packed: PackedTokens) -> torch.Tensor | None:
        hidden = self.policy.hidden_states(F.pad(tokens, (0, packed.padding)), packed)
        return None if hidden is None else hidden[: len(tokens)]

    def _integers(self, values: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self.policy.platform.device)
