"""What engines finished, and how every rank comes to have it: as tensors, from the ranks that own engines.

A step of DeepSeek-V3 has tens of millions of tokens and hundreds of ranks; only few of them own an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

REASONS = ("stop", "length", "abort")
"""Why a completion ends; see `Sample.finish_reason`."""


class Completion(NamedTuple):
    """A sample without its prompt; the fields are those of `Sample`."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    text: str


def from_all_ranks(mine: Mapping[int, Completion], group: dist.ProcessGroup) -> dict[int, Completion]:
    """The completions of all ranks, by their numbers, on every rank; every rank must call it.

    Log-probs come as fp32, which is what engines compute them in.

    Args:
        mine: This rank's; no other rank has the same numbers.
        group: All ranks of the job, with a backend for CPU tensors.
    """
    parts = _packed(mine)
    sizes = [torch.zeros(len(parts), dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([len(part) for part in parts]), group=group)
    found: dict[int, Completion] = {}
    for rank, size in enumerate(sizes):
        theirs = parts
        if rank != group.rank():
            theirs = [torch.empty(n, dtype=part.dtype) for n, part in zip(size.tolist(), parts, strict=True)]
        for part in theirs:
            if len(part):
                dist.broadcast(part, dist.get_global_rank(group, rank), group=group)
        found |= _unpacked(*theirs)
    return found


def _packed(completions: Mapping[int, Completion]) -> list[torch.Tensor]:
    """[4 n] number, tokens, bytes and reason of each; then the tokens, log-probs and UTF-8 texts of all."""
    heads: list[int] = []
    tokens: list[int] = []
    logprobs: list[float] = []
    texts = bytearray()
    for number, completion in completions.items():
        text = completion.text.encode()
        heads += [number, len(completion.token_ids), len(text), REASONS.index(completion.finish_reason)]
        tokens += completion.token_ids
        logprobs += completion.logprobs
        texts += text
    return [
        torch.tensor(heads, dtype=torch.int64),
        torch.tensor(tokens, dtype=torch.int32),
        torch.tensor(logprobs, dtype=torch.float32),
        torch.frombuffer(texts, dtype=torch.uint8) if texts else torch.empty(0, dtype=torch.uint8),
    ]


def _unpacked(
    heads: torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor, texts: torch.Tensor
) -> dict[int, Completion]:
    found, token, letter, raw = {}, 0, 0, texts.numpy().tobytes()
    for number, length, size, reason in heads.view(-1, 4).tolist():
        mine, token = slice(token, token + length), token + length
        text, letter = raw[letter : letter + size].decode(), letter + size
        found[number] = Completion(tuple(tokens[mine].tolist()), tuple(logprobs[mine].tolist()), REASONS[reason], text)
    return found
