"""What flows through one GRPO iteration: Prompt -> Sample -> Score -> Group -> Batch.

Everything here is plain data; the rooms agree on these types and on nothing else. torch is imported where tensors are
made and not before: processes that only read samples, as those of user rewards do, start without it.

Shape letters used in the project: T packed tokens, N sequences, G samples per prompt, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Prompt:
    """One problem whose answer can be checked.

    Attributes:
        id: Unique and stable over runs; sampling noise is keyed by it.
        token_ids: The prompt as the model reads it, special tokens included.
        text: The prompt as people read it.
        answer: Ground truth that a verifier compares with, as text.
        task: Name of the task the prompt belongs to; metrics and rewards may depend on it.
    """

    id: str
    token_ids: tuple[int, ...]
    text: str
    answer: str
    task: str


@dataclass(frozen=True)
class Sample:
    """One completion of a prompt, exactly as the engine sampled it.

    Attributes:
        prompt: The prompt it completes.
        index: Which of the prompt's G samples this is, from 0.
        token_ids: Sampled tokens, the stop token included when there is one.
        logprobs: Natural-log probability of each token under the full temperature-scaled softmax, before top-k and
            top-p; same length as `token_ids`.
        finish_reason: "stop" (a stop token was sampled), "length" (`max_new_tokens` or the context ran out) or "abort"
            (its generation was ended early).
        segments: (first token, policy version) of each run of tokens that weights of one version sampled, from token 0
            on; a version is the number of GRPO steps that the weights had seen. One segment unless weights were
            replaced on the way.
        text: `token_ids` decoded, without the stop token; other special tokens are kept.
        experts: [tokens of prompt and completion but the last, MoE layers, top k] int16, which experts the engine sent
            each token to; None when it does not say.
    """

    prompt: Prompt
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    segments: tuple[tuple[int, int], ...]
    text: str
    experts: torch.Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def policy_version(self) -> int:
        """The policy version that the sample was begun with."""
        return self.segments[0][1]


@dataclass(frozen=True)
class Score:
    """What a sample is worth.

    Attributes:
        total: The reward: sum of weight * term.
        terms: Unweighted value of every term of the reward, for example {"accuracy": 1.0}.
        reason: Why, in words, where somebody knows; shown beside the sample.
    """

    total: float
    terms: dict[str, float]
    reason: str = ""


@dataclass(frozen=True)
class Group:
    """The G samples of one prompt with their scores, in the same order."""

    samples: tuple[Sample, ...]
    scores: tuple[Score, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        """Total reward of each sample."""
        return tuple(score.total for score in self.scores)

    @property
    def prompt(self) -> Prompt:
        """The prompt every sample of the group completes."""
        return self.samples[0].prompt


@dataclass(frozen=True)
class Row:
    """A sequence of which some tokens are learned.

    Attributes:
        token_ids: The whole sequence.
        learned: (first, one past the last) of every stretch of tokens that is learned, in order; none begins at 0, as
            nothing predicts the first token.
    """

    token_ids: Sequence[int]
    learned: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Batch:
    """N packed sequences (prompt + completion) and, for every token, what the loss needs to know about it.

    Every `[T]` vector is aligned with the token it is about: `old_logprob[j]` is the log-probability of `tokens[j]`
    given the tokens before it in its sequence. Prompt tokens carry weight 0.

    Attributes:
        tokens: [T] int64.
        cu_seqlens: [N + 1] int64, start of every sequence in `tokens`, and T.
        prompts: [N] int64; sequences of the same number begin with the same tokens, which may be computed once.
        prompt_lengths: [N] int64, how many tokens those are; 0 where nothing is shared.
        mask: [T] bool, True on completion tokens.
        weight: [T] float32, mask / denominator over the *global* batch; loss = sum(weight * token_loss).
        advantage: [T] float32.
        rollout_logprob: [T] float32, as the engine sampled it.
        old_logprob: [T] float32, under the policy the update started from.
        ref_logprob: [T] float32, under the reference policy.
        experts: [T, MoE layers, top k] int16, which experts each token goes to, -1 for those that its scores choose;
            None when the scores always choose.
    """

    tokens: torch.Tensor
    cu_seqlens: torch.Tensor
    prompts: torch.Tensor
    prompt_lengths: torch.Tensor
    mask: torch.Tensor
    weight: torch.Tensor
    advantage: torch.Tensor
    rollout_logprob: torch.Tensor
    old_logprob: torch.Tensor
    ref_logprob: torch.Tensor
    experts: torch.Tensor | None = None

    @property
    def lengths(self) -> torch.Tensor:
        """[N] tokens of each sequence, prompt included."""
        return self.cu_seqlens.diff()

    def with_(self, **vectors: Any) -> Batch:
        """A copy with some fields replaced."""
        return replace(self, **vectors)

    def select(self, sequences: list[int]) -> Batch:
        """The batch that holds only these sequences, in this order."""
        import torch

        starts = self.cu_seqlens.tolist()
        rows = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in sequences]) if sequences else torch.arange(0)
        lengths = torch.tensor([0, *(starts[i + 1] - starts[i] for i in sequences)])
        per_token = ("tokens", "mask", "weight", "advantage", "rollout_logprob", "old_logprob", "ref_logprob")
        return Batch(
            cu_seqlens=lengths.cumsum(0),
            prompts=self.prompts[sequences],
            prompt_lengths=self.prompt_lengths[sequences],
            experts=None if self.experts is None else self.experts[rows],
            **{name: getattr(self, name)[rows] for name in per_token},
        )


def pack_tokens(sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> Batch:
    """Packs token sequences; in each, the tokens from its start on are masked in. All other vectors are zero."""
    import torch

    lengths = torch.tensor([0, *map(len, sequences)])
    tokens = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.int64)
    cu_seqlens = lengths.cumsum(0)
    sequence = torch.repeat_interleave(lengths[1:])
    mask = torch.arange(len(tokens)) >= (cu_seqlens[:-1] + torch.tensor(starts))[sequence]
    zeros = torch.zeros(len(tokens))
    apart = torch.arange(len(sequences))
    return Batch(tokens, cu_seqlens, apart, torch.zeros_like(apart), mask, zeros, zeros, zeros, zeros, zeros)


def pack_rows(rows: Sequence[Row]) -> Batch:
    """Packs rows: the tokens that are learned are masked in. All other vectors are zero."""
    batch = pack_tokens([row.token_ids for row in rows], [len(row.token_ids) for row in rows])
    for row, start in zip(rows, batch.cu_seqlens.tolist(), strict=False):
        for first, end in row.learned:
            batch.mask[start + first : start + end] = True
    return batch


def pack(samples: Sequence[Sample]) -> Batch:
    """Packs samples: completions are masked in and carry their rollout log-probs; prompts may be shared."""
    import torch

    lengths = [len(s.prompt.token_ids) for s in samples]
    batch = pack_tokens([s.prompt.token_ids + s.token_ids for s in samples], lengths)
    rollout = torch.zeros(len(batch.tokens))
    rollout[batch.mask] = torch.tensor([x for s in samples for x in s.logprobs])
    number = {tokens: i for i, tokens in enumerate(dict.fromkeys(s.prompt.token_ids for s in samples))}
    prompts = torch.tensor([number[s.prompt.token_ids] for s in samples], dtype=torch.int64)
    packed = batch.with_(rollout_logprob=rollout, prompts=prompts, prompt_lengths=torch.tensor(lengths))
    return packed.with_(experts=_packed_experts(samples, packed))


def _packed_experts(samples: Sequence[Sample], batch: Batch) -> torch.Tensor | None:
    """The experts of all tokens. A prompt's are those of its first sample: it may be computed once for all of them."""
    import torch

    known = [s.experts for s in samples if s.experts is not None]
    if not known:
        return None
    experts = torch.full((len(batch.tokens), *known[0].shape[1:]), -1, dtype=torch.int16)
    first: dict[int, torch.Tensor] = {}
    for sample, start, prompt in zip(samples, batch.cu_seqlens.tolist(), batch.prompts.tolist(), strict=False):
        if sample.experts is not None:
            experts[start : start + len(sample.experts)] = sample.experts
            shared = first.setdefault(prompt, sample.experts[: len(sample.prompt.token_ids)])
            experts[start : start + len(shared)] = shared
    return experts
