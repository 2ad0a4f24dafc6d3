"""What engines finished, and how every rank comes to have it: as tensors, from the ranks that own engines.

A step of DeepSeek-V3 has tens of millions of tokens and hundreds of ranks; only few of them own an engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from grpo_mega.config.schema import ModelConfig
from grpo_mega.rollout.contract import EngineError

REASONS = ("stop", "length", "abort")
"""Why a completion ends; see `Sample.finish_reason`."""
NO_EXPERTS = [0, 0, 0]
"""In place of a shape, of a completion that does not say which experts its tokens went to."""


class Completion(NamedTuple):
    """A sample without its prompt; the fields are those of `Sample`."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    text: str
    experts: torch.Tensor | None = None


def check(token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
    """Refuses what cannot be trained on.

    Raises:
        EngineError: There is not one finite log-prob for each token.
    """
    if len(token_ids) != len(logprobs):
        raise EngineError(f"a sample of SGLang has {len(token_ids)} tokens and {len(logprobs)} log-probs")
    bad = [i for i, logprob in enumerate(logprobs) if not math.isfinite(logprob)]
    if bad:
        raise EngineError(
            f"SGLang gives token {bad[0]} of a sample the log-prob {logprobs[bad[0]]}: are its weights whole? Set "
            "rollout.sglang.verify_every=1 to have them checked after every push"
        )


def routed(said: np.ndarray | None, tokens: int, model: ModelConfig) -> torch.Tensor:
    """[tokens, MoE layers, top k] int16, the experts that so many tokens went to, of all layers that SGLang lists.

    Raises:
        EngineError: It does not list them all, or not different experts of this model.
    """
    moe = model.moe
    shape = (tokens, model.layers, moe.top_k)
    if said is None or said.size != math.prod(shape):
        found = "nothing" if said is None else f"{said.size:,} numbers"
        raise EngineError(f"SGLang says {found} of the experts of {tokens} tokens; {math.prod(shape):,} are due")
    chosen = said.reshape(shape)[:, moe.first_dense :]
    if chosen.min() < 0 or chosen.max() >= moe.experts:
        raise EngineError(
            f"SGLang sent tokens to experts {chosen.min()} to {chosen.max()}, and the model has {moe.experts}"
        )
    if moe.top_k > 1 and not np.diff(np.sort(chosen, axis=-1), axis=-1).all():
        raise EngineError(
            "SGLang names an expert twice for one token, as when its kernels choose experts without recording them; "
            "choose another rollout.sglang.arguments.moe_runner_backend, or rollout.sglang.routing_replay=false"
        )
    return torch.from_numpy(chosen.astype(np.int16))


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
    """[7 n] number, tokens, bytes, reason and shape of experts; then all tokens, log-probs, UTF-8 texts and experts."""
    heads: list[int] = []
    tokens: list[int] = []
    logprobs: list[float] = []
    texts = bytearray()
    experts: list[torch.Tensor] = []
    for number, completion in completions.items():
        text = completion.text.encode()
        heads += [number, len(completion.token_ids), len(text), REASONS.index(completion.finish_reason)]
        heads += NO_EXPERTS if completion.experts is None else completion.experts.shape
        experts += [] if completion.experts is None else [completion.experts.flatten()]
        tokens += completion.token_ids
        logprobs += completion.logprobs
        texts += text
    return [
        torch.tensor(heads, dtype=torch.int64),
        torch.tensor(tokens, dtype=torch.int32),
        torch.tensor(logprobs, dtype=torch.float32),
        torch.frombuffer(texts, dtype=torch.uint8) if texts else torch.empty(0, dtype=torch.uint8),
        torch.cat(experts).view(torch.uint8) if experts else torch.empty(0, dtype=torch.uint8),  # gloo has no int16
    ]


def _unpacked(
    heads: torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor, texts: torch.Tensor, experts: torch.Tensor
) -> dict[int, Completion]:
    rows = heads.view(-1, 7).tolist()
    _, lengths, sizes, _, *shapes = zip(*rows, strict=True) if rows else ((),) * 7
    texts_of = [part.numpy().tobytes().decode() for part in texts.split(sizes)]
    experts_of = experts.view(torch.int16).split([*map(math.prod, zip(*shapes, strict=True))])
    parts = zip(rows, tokens.split(lengths), logprobs.split(lengths), texts_of, experts_of, strict=True)
    return {
        number: Completion(
            tuple(mine.tolist()),
            tuple(theirs.tolist()),
            REASONS[reason],
            text,
            None if shape == NO_EXPERTS else chosen.view(shape),
        )
        for (number, _, _, reason, *shape), mine, theirs, text, chosen in parts
    }
