"""Completions returned by SGLang, and checks that they can be trained on."""

from __future__ import annotations

import math
from array import array
from typing import NamedTuple

import numpy as np
import torch

from grpo_mega.config.schema import ModelConfig
from grpo_mega.rollout.contract import EngineError


class SGLangAnswer(NamedTuple):
    """A completion as the engine's process sends it; `experts` is [tokens * layers * top k], see `routed`."""

    token_ids: array[int]
    logprobs: array[float]
    finish_reason: str
    experts: np.ndarray | None = None


def check(token_ids: array[int], logprobs: array[float]) -> None:
    """Refuses a completion that cannot be trained on.

    Raises:
        EngineError: There is not exactly one finite log-prob for each token.
    """
    if len(token_ids) != len(logprobs):
        raise EngineError(f"a sample of SGLang has {len(token_ids)} tokens and {len(logprobs)} log-probs")
    bad = np.flatnonzero(~np.isfinite(np.asarray(logprobs)))
    if len(bad):
        raise EngineError(
            f"SGLang gives token {bad[0]} of a sample the log-prob {logprobs[bad[0]]}: are its weights whole? Set "
            "rollout.sglang.verify_every=1 to have them checked after every push"
        )


def routed(experts: np.ndarray | None, tokens: int, model: ModelConfig) -> torch.Tensor:
    """Routed experts of each token of a sequence.

    Args:
        experts: [tokens * layers * top k] as SGLang returns them, dense layers included; None when it returned none.
        tokens: Number of tokens.
        model: The model that SGLang serves.

    Returns:
        [tokens, MoE layers, top k] int16.

    Raises:
        EngineError: Experts are missing, out of range, or repeated for one token.
    """
    moe = model.moe
    shape = (tokens, model.layers, moe.top_k)
    if experts is None or experts.size != math.prod(shape):
        size = "nothing" if experts is None else f"{experts.size:,} numbers"
        raise EngineError(f"SGLang returned {size} for the experts of {tokens} tokens; {math.prod(shape):,} are due")
    chosen = experts.reshape(shape)[:, moe.first_dense :]
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
