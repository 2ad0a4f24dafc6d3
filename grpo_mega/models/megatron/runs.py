"""Splits attention over a packed row into calls of kernels that take sequences of any length.

The row is a concatenation of runs: whole sequences, prompts that several sequences begin with, and branches, the rest
of each of these sequences. A run attends to itself, causally, and a branch also to its whole prompt:

    | whole | whole | prompt A | prompt B | branch of A | branch of A | branch of B |

Branches are in the order of their prompts, so attention takes two calls over slices of the row, without repeating any
row: one of every run over itself, and one of the branches over the prompts, in which all branches of a prompt are one
sequence of queries. `varlen.py` merges the two. The idea is that of Hydragen (Juravsky et al., 2024, arXiv
2402.05099), there for inference.

Under context parallelism a rank has the keys of all rows, and queries of two stretches of them. A stretch cuts at most
its first and its last run. What is left of a run are its queries up to some row, over its keys up to the same row: a
causal mask that is aligned at the bottom right, as kernels have it. So there are two calls for each stretch, still over
slices, and no mask.

In layers with a window a branch sees only the end of its prompt, and where that begins depends on the query. There the
keys of a branch are gathered: those of the prompt that its first query sees, fewer than the window, and its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from grpo_mega.models.transfer import moved


@dataclass(frozen=True)
class RowRun:
    """Consecutive rows [start, end) that attend to themselves; those of a branch also to the whole run `prompt`."""

    start: int
    end: int
    prompt: RowRun | None = None


@dataclass(frozen=True)
class AttentionCall:
    """One call of a kernel: several sequences of queries, each over its own keys.

    Attributes:
        rows: The rows of this rank that are queries.
        keys: The rows that they attend to, among all rows: a slice, or [K] indices.
        query_starts, key_starts: [sequences + 1] int32, where each sequence begins, and the last ends.
        most_queries, most_keys: Largest number of queries, and of keys, of one sequence.
        causal: Whether a sequence's last query sees all its keys, the one before it one fewer, and so on; otherwise
            every query sees every key.
        window: Number of keys that a query sees in a causal call, its own included; None for all before it.
    """

    rows: slice
    keys: slice | torch.Tensor
    query_starts: torch.Tensor
    key_starts: torch.Tensor
    most_queries: int
    most_keys: int
    causal: bool
    window: int | None = None

    @classmethod
    def of(
        cls, rows: slice, keys: slice | torch.Tensor, queries: Sequence[int], seen: Sequence[int], **how: Any
    ) -> AttentionCall:
        """Makes a call from the number of queries, and of keys, of each sequence."""
        return cls(rows, keys, _starts(queries), _starts(seen), max(queries), max(seen), **how)

    def to(self, device: torch.device) -> AttentionCall:
        """The call with its tensors on another device."""
        keys = self.keys if isinstance(self.keys, slice) else moved(self.keys, device)
        starts = (moved(self.query_starts, device), moved(self.key_starts, device))
        return replace(self, keys=keys, query_starts=starts[0], key_starts=starts[1])


def in_runs(sequence: torch.Tensor, branches: torch.Tensor, first: torch.Tensor) -> tuple[torch.Tensor, list[RowRun]]:
    """Sorts a row's tokens so that they form runs.

    Args:
        sequence: [U] index of each token's sequence, ascending; for a token of a shared prompt, its first sequence.
        branches: [N] tokens at the end of each sequence that follow a prompt which it shares; 0 if it shares none.
        first: [N] the first sequence with the same prompt.

    Returns:
        [U] indices of the tokens, run by run, and the runs.
    """
    n = len(first)
    lengths = torch.bincount(sequence, minlength=n)
    # Tokens of a sequence after the prompt that it shares: the last `branches` ones.
    beyond = torch.arange(len(sequence)) - (lengths.cumsum(0) - branches)[sequence] >= 0
    is_prompt = torch.zeros(n, dtype=torch.bool).index_fill_(0, first[branches > 0], True)[sequence] & ~beyond
    # 0 for whole sequences, 1 for prompts, 2 for branches: the order of the runs in the row.
    kind = torch.where(beyond, 2, is_prompt.long())
    # Branches are sorted by the first sequence with their prompt, so that those of one prompt are adjacent and their
    # queries form a single sequence of a call.
    order = (kind * n + first[sequence]).argsort(stable=True)
    names, counts = torch.unique_consecutive((kind * n + sequence)[order], return_counts=True)
    runs: dict[int, RowRun] = {}
    ends = accumulate(counts.tolist())
    for name, count, end in zip(names.tolist(), counts.tolist(), ends, strict=True):
        # A run's name is kind * n + sequence: from 2 * n on it is a branch, whose prompt is named after the first
        # sequence with it. Prompts come before branches, so `runs` has it already.
        prompt = runs[n + int(first[name - 2 * n])] if name >= 2 * n else None
        runs[name] = RowRun(end - count, end, prompt)
    return order, [*runs.values()]


def calls_of(runs: Sequence[RowRun], held: Sequence[tuple[int, int]], window: int | None) -> list[AttentionCall]:
    """The calls for the queries of the stretches [start, end) of the row that a rank holds one after the other.

    In a layer with a `window` a token sees that many tokens, itself included.
    """
    calls: list[AttentionCall] = []
    before = 0
    for start, end in held:
        parts = [_RunPart(run, max(run.start, start), min(run.end, end)) for run in runs]
        calls += _calls_of_stretch([part for part in parts if part.first < part.end], before - start, window)
        before += end - start
    return calls


@dataclass(frozen=True)
class _RunPart:
    """The rows [first, end) of a run that a stretch holds."""

    run: RowRun
    first: int
    end: int


def _calls_of_stretch(parts: list[_RunPart], shift: int, window: int | None) -> Iterator[AttentionCall]:
    """Yields the calls for consecutive parts of runs; a local row is its row in the whole row plus `shift`."""
    if not parts:
        return
    rows = slice(parts[0].first + shift, parts[-1].end + shift)
    queries = [part.end - part.first for part in parts]
    branches = [part for part in parts if part.run.prompt]
    # One call with gathered keys instead of two: which part of the prompt a query sees depends on the query.
    if window is not None and branches:
        keys = [_seen_in_window(part, window) for part in parts]
        yield AttentionCall.of(rows, torch.cat(keys), queries, [len(each) for each in keys], causal=True, window=window)
        return
    # Keys begin with the run even where the stretch does not: a rank has the keys of all rows.
    own = [part.end - part.run.start for part in parts]
    yield AttentionCall.of(rows, slice(parts[0].run.start, parts[-1].end), queries, own, causal=True, window=window)
    if branches:
        askers: dict[RowRun, int] = {}
        for part in branches:
            assert part.run.prompt is not None
            askers[part.run.prompt] = askers.get(part.run.prompt, 0) + part.end - part.first
        prompts = [*askers]
        rows = slice(branches[0].first + shift, branches[-1].end + shift)
        keys_of_prompts = slice(prompts[0].start, prompts[-1].end)
        yield AttentionCall.of(
            rows, keys_of_prompts, [*askers.values()], [p.end - p.start for p in prompts], causal=False
        )


def _seen_in_window(part: _RunPart, window: int) -> torch.Tensor:
    """[K] rows that a query of the part sees: of the prompt, if there is one, and of its run."""
    own = torch.arange(max(part.run.start, part.first - window + 1), part.end)
    if part.run.prompt is None:
        return own
    # What is left of the window of the first query after itself and the tokens of its run before it.
    of_prompt = window - 1 - (part.first - part.run.start)
    start = max(part.run.prompt.start, part.run.prompt.end - max(0, of_prompt))
    return torch.cat([torch.arange(start, part.run.prompt.end), own])


def _starts(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
