"""The data of one GRPO iteration: Prompt -> Sample -> Score -> Group -> Batch.

Everything here is plain data; the rooms agree on these types and on nothing else. torch is imported only where tensors
are made, so that processes that only read samples, such as those of user rewards, start without it.

Shape letters used in the project: T packed tokens, N sequences, G samples per prompt, V vocabulary, H hidden size.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True)
class Prompt:
    """One problem whose answer can be checked.

    Attributes:
        id: Unique and stable over runs; sampling noise depends on it.
        token_ids: The prompt's tokens, special tokens included.
        text: The prompt as text.
        answer: Ground truth that a verifier compares with, as text.
        task: Name of the task the prompt belongs to; metrics and rewards may depend on it.
        metadata: Further fields of the problem that rewards read, such as hidden tests: values as JSON has them.
        asked: The problem before a template made `text` of it: text, or messages as JSON has them; who learns from a
            sample, or is taught by it, may have another template.
    """

    id: str
    token_ids: tuple[int, ...]
    text: str
    answer: str
    task: str
    metadata: dict[str, Any] = field(default_factory=dict, hash=False)
    asked: str | list[dict[str, str]] = field(default="", hash=False)


@dataclass(frozen=True)
class Sample:
    """One completion of a prompt, exactly as the engine sampled it.

    One rank of the job holds it: a step of a large model has tens of millions of tokens, whose four bytes each are
    affordable on one rank but not on hundreds. Every other rank has only its `Answer`.

    Attributes:
        prompt: The prompt it completes.
        index: Index of this sample among the prompt's G samples.
        token_ids: Sampled tokens, the stop token included when there is one: an array of C ints.
        logprobs: Natural-log probability of each token under the full temperature-scaled softmax, before top-k and
            top-p; same length as `token_ids`: an array of C floats.
        finish_reason: "stop" (a stop token was sampled), "length" (`max_new_tokens` or the context ran out) or "abort"
            (its generation was ended early).
        segments: (first token, policy version) of each stretch of tokens that weights of one version sampled, from
            token 0 on; a version is the number of optimizer updates of the weights. One segment, unless weights were
            replaced during generation.
        text: `token_ids` decoded, without the stop token; other special tokens are kept.
        experts: [tokens of prompt and completion but the last, MoE layers, top k] int16, the experts that the engine
            sent each token to; None when the engine does not return them.
    """

    prompt: Prompt
    index: int
    token_ids: array[int]
    logprobs: array[float]
    finish_reason: str
    segments: tuple[tuple[int, int], ...]
    text: str
    experts: torch.Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def policy_version(self) -> int:
        """The policy version that sampled the first token."""
        return self.segments[0][1]

    def repeated(self, size: int) -> float:
        """The share of its stretches of `size` tokens that came before in it, in [0, 1); 0 when it is shorter than one.

        In an answer that goes round in circles it is close to 1.
        """
        tokens, width = self.token_ids.tobytes(), self.token_ids.itemsize
        count = len(self.token_ids) - size + 1
        if count < 1:
            return 0.0
        different = {tokens[start : start + width * size] for start in range(0, width * count, width)}
        return (count - len(different)) / count


@dataclass(frozen=True)
class Score:
    """The reward of a sample.

    Attributes:
        total: The reward: sum of weight * term.
        terms: Unweighted value of every term of the reward, for example {"accuracy": 1.0}.
        reason: An explanation in words, if a term gives one; shown beside the sample.
        unscorable: Why the sample has no reward, such as a service that did not answer; empty when it has one. A sample
            that could not be scored has a total of 0 and no terms, is left out of its group and is counted.
        steps: (index of its last token in the completion, its reward) of each step, in order: all terms' together with
            their weights, for process supervision; () without it, and where no term scores steps.
    """

    total: float
    terms: dict[str, float]
    reason: str = ""
    unscorable: str = ""
    steps: tuple[tuple[int, float], ...] = ()


STRETCH = 8
"""Tokens that hardly come twice in a text that gets on."""
NOBODY = -1
"""The rank that holds a sample which no rank holds any more."""


@dataclass(frozen=True)
class Answer:
    """The part of a sample that every rank has: all but its tokens, log-probs and text.

    Attributes:
        length: Number of sampled tokens.
        finish_reason, segments: See `Sample`.
        score: Its reward.
        holder: The rank that holds the sample; `NOBODY` of an answer that was read from a checkpoint.
        repeated: The share of its stretches of `STRETCH` tokens that came before in it.
    """

    length: int
    finish_reason: str
    segments: tuple[tuple[int, int], ...]
    score: Score
    holder: int = NOBODY
    repeated: float = 0.0


@dataclass(frozen=True)
class Group:
    """The answers to one prompt, in the order of their samples' indices."""

    prompt: Prompt
    answers: tuple[Answer, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        """Total reward of each sample that could be scored."""
        return tuple(answer.score.total for answer in self.answers if not answer.score.unscorable)


@dataclass(frozen=True)
class Rollout:
    """Scored answers to prompts.

    Attributes:
        groups: The answers, the same on every rank.
        samples: Number -> sample, of the samples that this rank holds. Samples are numbered from 0, group after group.
    """

    groups: list[Group]
    samples: dict[int, Sample]

    @property
    def answers(self) -> Iterator[Answer]:
        """The answers of all groups, in the order of their samples' numbers."""
        return (answer for group in self.groups for answer in group.answers)


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


@dataclass(frozen=True, kw_only=True)
class TokenColumns:
    """Columns with one value for each of T tokens. A further column is declared here, and nowhere else.

    Every column is aligned with the tokens: `old_logprob[j]` is the log-probability of `tokens[j]` given the tokens
    before it in its sequence.

    Attributes:
        tokens: [T] int32.
        mask: [T] bool, True on the tokens that are learned: completions.
        weight: [T] float32, mask / denominator over the *global* batch; loss = sum(weight * token_loss).
        advantage: [T] float32.
        rollout_logprob: [T] float32, log-prob under the engine.
        old_logprob: [T] float32, log-prob under the policy that the update started from.
        ref_logprob: [T] float32, log-prob under the reference policy.
        experts: [T, MoE layers, top k] int16, the experts that each token goes to, -1 where the router's scores choose;
            None when they always do.
        correction: [T] float32, factor of each token's policy term, whose loss is left out where it is 0; None when all
            are 1, or the loss makes them itself.
        value: [T] float32, a critic's estimate, before the token, of the rewards to come; None without a critic.
        returns: [T] float32, what a model with a scalar head learns to estimate: a critic's returns, labels of steps;
            None without either.
        teacher_logprob: [T] float32, log-prob under a teacher; None without one.
        new_logprob, new_entropy: [T] float32, log-prob and entropy (of the distribution that the token was drawn from)
            under the policy of the latest update that computed the token, as its loss found them; for people to see, no
            loss reads them. None before the first update.
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    weight: torch.Tensor
    advantage: torch.Tensor
    rollout_logprob: torch.Tensor
    old_logprob: torch.Tensor
    ref_logprob: torch.Tensor
    experts: torch.Tensor | None = None
    correction: torch.Tensor | None = None
    value: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    teacher_logprob: torch.Tensor | None = None
    new_logprob: torch.Tensor | None = None
    new_entropy: torch.Tensor | None = None

    def columns(self) -> dict[str, torch.Tensor]:
        """Name -> column, without those that are None."""
        named = {f.name: getattr(self, f.name) for f in fields(TokenColumns)}
        return {name: column for name, column in named.items() if column is not None}


@dataclass(frozen=True, kw_only=True)
class Batch(TokenColumns):
    """N packed sequences (prompt + completion) that one data parallel replica computes.

    All ranks of a replica have the same batch. Only `weight` depends on the global batch.

    Attributes:
        cu_seqlens: [N + 1] int64, start of every sequence in `tokens`, and T.
        numbers: [N] int64, number of each sequence in the global batch, ascending.
        prompts: [N] int64, number of each sequence's prompt: sequences with the same number begin with the same tokens,
            which may be computed once.
        prompt_lengths: [N] int64, number of tokens that those sequences share; 0 where nothing is shared.
    """

    cu_seqlens: torch.Tensor
    numbers: torch.Tensor
    prompts: torch.Tensor
    prompt_lengths: torch.Tensor

    @property
    def lengths(self) -> torch.Tensor:
        """[N] tokens of each sequence, prompt included."""
        return self.cu_seqlens.diff()

    def with_(self, **fields: Any) -> Batch:
        """A copy with some fields replaced."""
        return replace(self, **fields)

    def select(self, sequences: Sequence[int]) -> Batch:
        """A batch of only these of the N sequences, by their indices, in this order."""
        import torch

        chosen = torch.tensor(sequences, dtype=torch.int64)
        lengths, starts = self.lengths[chosen], self.cu_seqlens[chosen].tolist()
        ends = [start + length for start, length in zip(starts, lengths.tolist(), strict=True)]
        parts = [slice(start, end) for start, end in zip(starts, ends, strict=True)] or [slice(0, 0)]
        return Batch(
            cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
            numbers=self.numbers[chosen],
            prompts=self.prompts[chosen],
            prompt_lengths=self.prompt_lengths[chosen],
            **{name: torch.cat([column[part] for part in parts]) for name, column in self.columns().items()},
        )


@dataclass(frozen=True, kw_only=True)
class ScoredTokens(TokenColumns):
    """The n tokens of a micro-batch that are scored, as a loss reads them; every column is [n].

    Attributes:
        index: [n] index of each token in the batch.
        cu_seqlens: [B + 1] start of the scored tokens of each of the micro-batch's B sequences among the n, and n; None
            for a part of a micro-batch. (That of `Batch` counts all tokens.)
    """

    index: torch.Tensor
    cu_seqlens: torch.Tensor | None = None

    @classmethod
    def of(cls, batch: Batch, index: torch.Tensor, cu_seqlens: torch.Tensor) -> ScoredTokens:
        """The tokens at [n] indices of the batch; without what no loss reads."""
        unread = ("experts", "new_logprob", "new_entropy")
        columns = {name: column[index] for name, column in batch.columns().items() if name not in unread}
        return cls(index=index, cu_seqlens=cu_seqlens, **columns | {"tokens": columns["tokens"].long()})

    def part(self, part: slice) -> ScoredTokens:
        """A consecutive part of the tokens, without `cu_seqlens`."""
        columns = {name: column[part] for name, column in self.columns().items()}
        return ScoredTokens(index=self.index[part], **columns)

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ScoredTokens:
        """The tokens with all columns changed by `change`, such as moved to a device."""
        cu_seqlens = self.cu_seqlens if self.cu_seqlens is None else change(self.cu_seqlens)
        columns = {name: change(column) for name, column in self.columns().items()}
        return ScoredTokens(index=change(self.index), cu_seqlens=cu_seqlens, **columns)


def pack_tokens(sequences: Sequence[Sequence[int] | np.ndarray], starts: Sequence[int]) -> Batch:
    """Packs token sequences; in each, the tokens from its entry of `starts` on are masked in; other columns are 0."""
    import numpy as np
    import torch

    lengths = torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int64)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    parts = [np.asarray(sequence, dtype=np.int32) for sequence in sequences]
    mask = torch.ones(int(lengths.sum()), dtype=torch.bool)
    for first, start in zip(cu_seqlens.tolist(), starts, strict=False):
        mask[first : first + start] = False
    zeros = torch.zeros(len(mask))
    numbers = torch.arange(len(sequences))
    return Batch(
        tokens=torch.from_numpy(np.concatenate(parts)) if parts else torch.zeros(0, dtype=torch.int32),
        mask=mask,
        weight=zeros,
        advantage=zeros,
        rollout_logprob=zeros,
        old_logprob=zeros,
        ref_logprob=zeros,
        cu_seqlens=cu_seqlens,
        numbers=numbers,
        prompts=numbers,
        prompt_lengths=torch.zeros_like(numbers),
    )


def pack_rows(rows: Sequence[Row]) -> Batch:
    """Packs rows: the tokens that are learned are masked in. Other columns are zero."""
    batch = pack_tokens([row.token_ids for row in rows], [len(row.token_ids) for row in rows])
    for row, start in zip(rows, batch.cu_seqlens.tolist(), strict=False):
        for first, end in row.learned:
            batch.mask[start + first : start + end] = True
    return batch
