"""The data of one GRPO iteration: Prompt -> Sample -> Score -> Group -> Batch.

Everything here is plain data; the rooms share only these types. torch is imported only where tensors are made, so that
processes that only read samples, such as those of user rewards, start without it.

Shape letters used in the project: T packed tokens, N sequences, G samples per prompt, V vocabulary, H hidden size.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

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
        answer: Ground truth for the verifier, as text.
        task: Name of the prompt's task; metrics and rewards may depend on it.
        metadata: Further fields of the problem that rewards read, such as hidden tests, with JSON values.
        asked: The problem before templating: text, or chat messages as JSON; models trained on the sample may use
            another template.
        opening: What an environment's `reset` has added to the problem: in `text` and `token_ids`, not in `asked`.
        request: An agent's first request, of which `text` and `token_ids` are made, as JSON; "" without one.
        unopened: Why `reset`, or the agent, failed, so that no sample can have a score; "" if it did not.
    """

    id: str
    token_ids: tuple[int, ...]
    text: str
    answer: str
    task: str
    metadata: dict[str, Any] = field(default_factory=dict, hash=False)
    asked: str | list[dict[str, str]] = field(default="", hash=False)
    opening: str = ""
    request: str = ""
    unopened: str = ""


Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Decodes token ids to text, as for `Sample.text`."""
Spans: TypeAlias = tuple[tuple[int, int], ...]
"""(first, one past the last) of spans of tokens, in order and apart from each other."""


def sampled_spans(length: int, given: Spans) -> list[tuple[int, int]]:
    """The spans of a sample of `length` tokens that lie between its `given` ones; none is empty."""
    bounds = [0, *(bound for span in given for bound in span), length]
    return [(first, end) for first, end in zip(bounds[::2], bounds[1::2], strict=True) if first < end]


def given_tokens(given: Spans) -> int:
    """Number of tokens in the spans."""
    return sum(end - first for first, end in given)


class Call(NamedTuple):
    """A turn's call, or several in one, that the environment has answered.

    Attributes:
        text: The call.
        error: Whether the reply says that one was wrong.
        reward: The reward of the turn; None if the environment gave none.
        undone: Whether it was stopped for its CPU seconds, so that the episode goes on as if it had not been made.
        then: Digest of the request that an agent made after it; "" if that was its last.
    """

    text: str
    error: bool
    reward: float | None = None
    undone: bool = False
    then: str = ""


@dataclass(frozen=True)
class Sample:
    """All that follows a prompt: what the engine sampled, exactly, and what it was given in between, such as replies.

    One rank of the job holds a finished one: a step of a large model has tens of millions of tokens, whose four bytes
    each are affordable on one rank but not on hundreds. Every other rank has only its `SampleInfo`. Unfinished ones
    are on all ranks, as any may go on with them.

    Attributes:
        prompt: Prompt of the completion.
        index: Index of this sample among the prompt's G samples.
        token_ids: Tokens after the prompt, including the stop token if any: an array of C ints.
        logprobs: Natural-log probability of each token under the full temperature-scaled softmax, before top-k and
            top-p, 0 for given tokens; same length as `token_ids`: an array of C floats.
        finish_reason: "stop" (a stop token was sampled), "length" (`max_new_tokens` or the context ran out), "abort"
            (its engine gave it up, or its environment failed), "slice" or "turn" (it is unfinished: see
            `rollout/engine.py`).
        segments: (first token, policy version) of each run of tokens sampled with one version of the weights, from
            token 0 on; a version is the number of optimizer updates of the weights. One segment, unless weights were
            replaced during generation.
        text: `token_ids` decoded, without the stop token; other special tokens are kept.
        experts: [tokens of prompt and completion but the last, MoE layers, top k] int16, the experts that the weights
            of its last slice sent each token to; None when the engine does not return them.
        given: Spans of `token_ids` that were not sampled but given, in order; they are never learned.
        calls: The calls of an environment so far. Each has a span in `given` that is the reply, except for a last one
            that ended the episode, or whose reply did not fit.
        reward: The environment's reward for the whole sample, one term of its `Score`; None before the end, and where
            it gives none.
        restarts: Positions in `token_ids`, ascending and above 0, at which the context begins anew, as where an agent
            has rewritten its history: these tokens and those after them see nothing before, not even the prompt. Each
            is the first of a span in `given`. The tokens between two of them are a piece; the first piece has the
            prompt before it.
        number: The number that `Wanted` gave it, by which whoever wanted it knows it again.
    """

    prompt: Prompt
    index: int
    token_ids: array[int]
    logprobs: array[float]
    finish_reason: str
    segments: tuple[tuple[int, int], ...]
    text: str
    experts: torch.Tensor | None = field(default=None, compare=False, repr=False)
    given: Spans = ()
    calls: tuple[Call, ...] = ()
    reward: float | None = None
    restarts: tuple[int, ...] = ()
    number: int = field(default=0, compare=False)

    @property
    def policy_version(self) -> int:
        """Policy version that sampled the first token."""
        return self.segments[0][1]

    @property
    def sampled(self) -> int:
        """Number of tokens that the policy sampled; an environment's replies do not count."""
        return len(self.token_ids) - given_tokens(self.given)

    def repeated(self, size: int) -> float:
        """Share of `size`-grams of sampled tokens that repeat an earlier one, in [0, 1); 0 if there are none.

        Close to 1 for a sample that loops.
        """
        tokens, width = self.token_ids.tobytes(), self.token_ids.itemsize
        spans = sampled_spans(len(self.token_ids), self.given)
        starts = [start for first, end in spans for start in range(first, end - size + 1)]
        if not starts:
            return 0.0
        different = {tokens[width * start : width * (start + size)] for start in starts}
        return (len(starts) - len(different)) / len(starts)


@dataclass(frozen=True)
class Score:
    """The reward of a sample.

    Attributes:
        total: The reward: sum of weight * term.
        terms: Unweighted value of every term of the reward, for example {"accuracy": 1.0}; without terms of weight 0
            that could not be scored.
        reason: An explanation in words, if a term gives one; shown next to the sample.
        unscorable: Why the sample has no reward, e.g. a service did not answer; empty when it has one. An unscorable
            sample has a total of 0 and no terms, is left out of its group, and is counted.
        steps: (index of last token in the completion, reward) of each step, in order, summed over terms with their
            weights, for process supervision; () otherwise.
    """

    total: float
    terms: dict[str, float]
    reason: str = ""
    unscorable: str = ""
    steps: tuple[tuple[int, float], ...] = ()


STRETCH = 8
"""n of the n-grams of `Sample.repeated`: in normal text they rarely occur twice."""
NOBODY = -1
"""Holder of a sample that no rank holds any more."""


@dataclass(frozen=True)
class SampleInfo:
    """The part of a sample that every rank has: everything except tokens, log-probs and text.

    Attributes:
        length: Number of tokens after the prompt, given ones included.
        finish_reason, segments, given, restarts: See `Sample`.
        score: Reward of the sample.
        holder: The rank that holds the sample; `NOBODY` for one read from a checkpoint.
        repeated: `Sample.repeated` for `STRETCH` tokens.
        calls, errors: Numbers of calls, and of those that were wrong, as `Call.error` says.
    """

    length: int
    finish_reason: str
    segments: tuple[tuple[int, int], ...]
    score: Score
    holder: int = NOBODY
    repeated: float = 0.0
    given: Spans = ()
    calls: int = 0
    errors: int = 0
    restarts: tuple[int, ...] = ()

    @property
    def sampled(self) -> int:
        """Number of sampled tokens: those that are learned, and that denominators count."""
        return self.length - given_tokens(self.given)


@dataclass(frozen=True)
class Group:
    """What is known of the samples of one prompt, in the order of their indices."""

    prompt: Prompt
    infos: tuple[SampleInfo, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        """Total reward of each scored sample."""
        return tuple(info.score.total for info in self.infos if not info.score.unscorable)


@dataclass(frozen=True)
class Rollout:
    """Scored samples of prompts.

    Attributes:
        groups: What is known of the samples, the same on every rank.
        samples: Number -> sample, for the samples that this rank holds. Samples are numbered from 0, group after group.
    """

    groups: list[Group]
    samples: dict[int, Sample]

    @property
    def infos(self) -> Iterator[SampleInfo]:
        """What is known of the samples of all groups, in the order of their numbers."""
        return (info for group in self.groups for info in group.infos)


@dataclass
class GroupInFlight:
    """A group that is being generated, or is complete and waits for its step. The same on every rank.

    Attributes:
        prompt: The group's prompt.
        draw: The draw of its samples' noise; None for that of the sampling parameters.
        so_far: By index, what an unfinished sample has after its latest slice; None before its first, and at the end.
        infos: By index, what is known of a finished sample; None before.
        seats: By index, the seat in which a sample is generated, after others; empty if none waits for another.
        completed: Number of the slice that finished the last of its samples; 0 before.
    """

    prompt: Prompt
    draw: int | None
    so_far: list[Sample | None]
    infos: list[SampleInfo | None]
    seats: list[int] = field(default_factory=list)
    completed: int = 0


@dataclass
class StreamState:
    """All that a stream of samples (`rollout/stream.py`) knows between two slices.

    Attributes:
        groups: Number -> group, in the order of submission.
        submitted: Number of groups submitted so far, those included that steps have taken.
        slices: Number of slices so far.
        samples: Number -> finished sample of these groups, for those that this rank holds.
    """

    groups: dict[int, GroupInFlight] = field(default_factory=dict)
    submitted: int = 0
    slices: int = 0
    samples: dict[int, Sample] = field(default_factory=dict)

    def copy(self) -> StreamState:
        """A copy that later slices leave alone."""
        groups = {
            number: replace(group, so_far=[*group.so_far], infos=[*group.infos])
            for number, group in self.groups.items()
        }
        return replace(self, groups=groups, samples={**self.samples})


@dataclass(frozen=True)
class Row:
    """A training sequence with some tokens to learn.

    Attributes:
        token_ids: The whole sequence.
        learned: Spans of learned tokens; none begins at 0, as nothing predicts the first token.
    """

    token_ids: Sequence[int]
    learned: Spans


@dataclass(frozen=True, kw_only=True)
class TokenColumns:
    """Columns with one value for each of T tokens. New columns are declared only here.

    Every column is aligned with the tokens: `old_logprob[j]` is the log-probability of `tokens[j]` given the tokens
    before it in its sequence.

    Attributes:
        tokens: [T] int32.
        mask: [T] bool, True on learned tokens: those that the policy sampled.
        weight: [T] float32, mask / denominator over the *global* mini-batch; loss = sum(weight * token_loss).
        advantage: [T] float32.
        rollout_logprob: [T] float32, log-prob under the engine.
        old_logprob: [T] float32, log-prob under the policy before the step's first update.
        ref_logprob: [T] float32, log-prob under the reference policy.
        experts: [T, MoE layers, top k] int16, the experts that each token is routed to, -1 where the router chooses;
            None when it always does.
        restarts: [T] bool, True on the first token of each further piece of a sequence: it and what follows do not see
            what came before; None when every sequence is one piece.
        correction: [T] float32, factor of each token's policy term, 0 to drop the token's loss; None when all are 1, or
            the loss computes them itself.
        value: [T] float32, a critic's estimate, before the token, of the future rewards; None without a critic.
        returns: [T] float32, targets of a model with a scalar head: a critic's returns or labels of steps; None without
            either.
        teacher_logprob: [T] float32, log-prob under a teacher; None without one.
        new_logprob, new_entropy: [T] float32, log-prob and entropy (of the sampling distribution) under the policy of
            the latest update that computed the token; for display only, no loss reads them. None before the first
            update.
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    weight: torch.Tensor
    advantage: torch.Tensor
    rollout_logprob: torch.Tensor
    old_logprob: torch.Tensor
    ref_logprob: torch.Tensor
    experts: torch.Tensor | None = None
    restarts: torch.Tensor | None = None
    correction: torch.Tensor | None = None
    value: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    teacher_logprob: torch.Tensor | None = None
    new_logprob: torch.Tensor | None = None
    new_entropy: torch.Tensor | None = None

    def columns(self) -> dict[str, torch.Tensor]:
        """{name: column} of the columns that are not None."""
        named = {f.name: getattr(self, f.name) for f in fields(TokenColumns)}
        return {name: column for name, column in named.items() if column is not None}


@dataclass(frozen=True, kw_only=True)
class Batch(TokenColumns):
    """N packed sequences (prompt + completion) that one data parallel replica computes.

    All ranks of a replica have the same batch. `weight`, `advantage` and `correction` may depend on
    sequences of other replicas.

    Attributes:
        cu_seqlens: [N + 1] int64, start of every sequence in `tokens`, then T.
        numbers: [N] int64, number of each sequence in the global batch, ascending.
        prompts: [N] int64, number of each sequence's prompt: sequences with the same number begin with the same tokens,
            which may be computed once.
        prompt_lengths: [N] int64, number of tokens that sequences of the same prompt share; 0 if nothing is shared.
    """

    cu_seqlens: torch.Tensor
    numbers: torch.Tensor
    prompts: torch.Tensor
    prompt_lengths: torch.Tensor

    @property
    def lengths(self) -> torch.Tensor:
        """[N] number of tokens of each sequence, prompt included."""
        return self.cu_seqlens.diff()

    @property
    def pieces(self) -> torch.Tensor:
        """[N] number of pieces of each sequence: 1, and 1 more for each restart."""
        import torch

        if self.restarts is None:
            return torch.ones_like(self.numbers)
        return torch.nn.functional.pad(self.restarts.cumsum(0), (1, 0))[self.cu_seqlens].diff() + 1

    def in_pieces(self) -> Batch:
        """Batch of the same tokens in which each piece is a sequence of its own, with the number of its sequence.

        Only first pieces have a prompt to share.
        """
        import torch

        if self.restarts is None:
            return self
        pieces = self.pieces
        first = torch.nn.functional.pad(pieces.cumsum(0), (1, 0))[:-1]
        prompts = -1 - torch.arange(int(pieces.sum()))  # unlike those of all sequences, which count from 0
        prompt_lengths = torch.zeros_like(prompts)
        prompts[first], prompt_lengths[first] = self.prompts, self.prompt_lengths
        return replace(
            self,
            cu_seqlens=torch.cat([self.cu_seqlens, self.restarts.nonzero()[:, 0]]).sort().values,
            numbers=self.numbers.repeat_interleave(pieces),
            prompts=prompts,
            prompt_lengths=prompt_lengths,
            restarts=None,
        )

    def with_(self, **fields: Any) -> Batch:
        """A copy with some fields replaced."""
        return replace(self, **fields)

    def select(self, sequences: Sequence[int]) -> Batch:
        """Batch of only these of the N sequences, by index, in this order."""
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
    """The n tokens of a micro-batch that a loss reads; every column is [n].

    Attributes:
        index: [n] index of each token in the batch.
        cu_seqlens: [B + 1] start of the scored tokens of each of the micro-batch's B sequences among the n, and n; None
            for a part of a micro-batch. (That of `Batch` counts all tokens.)
    """

    index: torch.Tensor
    cu_seqlens: torch.Tensor | None = None

    @classmethod
    def of(cls, batch: Batch, index: torch.Tensor, cu_seqlens: torch.Tensor) -> ScoredTokens:
        """The tokens at [n] indices of the batch, without the columns that no loss reads."""
        unread = ("experts", "restarts", "new_logprob", "new_entropy")
        columns = {name: column[index] for name, column in batch.columns().items() if name not in unread}
        return cls(index=index, cu_seqlens=cu_seqlens, **columns | {"tokens": columns["tokens"].long()})

    def part(self, part: slice) -> ScoredTokens:
        """A consecutive part of the tokens, without `cu_seqlens`."""
        columns = {name: column[part] for name, column in self.columns().items()}
        return ScoredTokens(index=self.index[part], **columns)

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ScoredTokens:
        """The tokens with every column transformed by `change`, e.g. moved to a device."""
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
    # One tensor for five columns, and one for two: columns are replaced (`with_`), never written in place.
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
    """Packs rows, with learned tokens masked in. Other columns are zero."""
    batch = pack_tokens([row.token_ids for row in rows], [len(row.token_ids) for row in rows])
    for row, start in zip(rows, batch.cu_seqlens.tolist(), strict=False):
        for first, end in row.learned:
            batch.mask[start + first : start + end] = True
    return batch


@dataclass(frozen=True)
class MiniBatch:
    """Samples of one mini-batch, by number within the step.

    Attributes:
        trained: Samples that are computed, in ascending order; at least one.
        left_out: Samples that only count in the denominators, because they have no gradient.
    """

    trained: list[int]
    left_out: list[int]


@dataclass
class Step:
    """A step whose samples are generated and scored: what its updates compute, and what they have done.

    Everything that follows from the samples is worked out once, when they are complete (`stages/step.py`). A checkpoint
    in the middle of a step saves it, and a resumed run goes on with the same (`checkpoint/step_in_progress.py`).

    Attributes:
        groups: The samples, as every rank knows them.
        signal: Whether each group has signal.
        epochs: The mini-batches of each epoch, in the order of updates. Each epoch computes the same samples.
        batch: This replica's part of the samples that updates compute, with all log-probs that updates need; None when
            no update can move the policy.
        shown: Records of some of the samples for samples/, on the main rank; empty on the others.
        updates: Metrics of each update done so far.
        mismatch: Without a batch, metrics of the difference between the trainer's and the engine's log-probs.
        shown_groups: Indices of the groups whose samples are in `shown`, on every rank.
        loads: Number of a layer -> tokens that each of its experts got in the last update; {} before the first update,
            and for a dense model.
        version: Policy version before the step's updates; the samples may be of earlier ones.
    """

    groups: list[Group]
    signal: list[bool]
    epochs: list[list[MiniBatch]]
    batch: Batch | None = None
    shown: list[dict[str, Any]] = field(default_factory=list)
    updates: list[dict[str, float]] = field(default_factory=list)
    mismatch: dict[str, float] = field(default_factory=dict)
    shown_groups: list[int] = field(default_factory=list)
    loads: dict[str, list[float]] = field(default_factory=dict)
    version: int = 0

    @property
    def mini_batches(self) -> list[MiniBatch]:
        """The mini-batches of all updates, epoch after epoch."""
        return [mini_batch for epoch in self.epochs for mini_batch in epoch]
