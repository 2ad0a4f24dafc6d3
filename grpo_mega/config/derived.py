"""Conclusions from settings, shared by training, the planner and the rules: the attention kernel, the passes of
log-probs in a step, the profiled steps.
"""

from __future__ import annotations

import math
import re

from grpo_mega.config.schema import AlgorithmConfig, DistillConfig, LayoutConfig, ModelConfig
from grpo_mega.errors import InputError

MOST_CHANNELS = 256
"""Largest number of channels of a head in FlashAttention-2."""


def attention_on_gpu(layout: LayoutConfig, model: ModelConfig) -> str:
    """`layout.attention` on a GPU, where auto means torch's kernel if that can compute the model."""
    if layout.attention == "auto":
        return "padded" if why_padded(model) else "torch"
    return layout.attention


def why_padded(model: ModelConfig) -> str | None:
    """Why kernels for sequences of any length cannot compute this model; None when they can."""
    if model.dtype != "bf16":
        return f"model.dtype={model.dtype}: the kernels compute in bf16"
    if (channels := key_channels(model)) > MOST_CHANNELS:
        return f"heads have {channels} channels: the kernels take {MOST_CHANNELS}"
    return None


def key_channels(model: ModelConfig) -> int:
    """Channels of a head's queries and keys."""
    if model.attention == "mla":
        return model.mla.qk_head_dim + model.mla.qk_rope_dim
    return model.head_dim or model.hidden // model.heads


def corrects_beyond_tokens(algorithm: AlgorithmConfig) -> bool:
    """Whether the correction for the engine needs to know whole sequences or the batch, not one token alone."""
    rejects = algorithm.rejection_floor > 0 or algorithm.rejection_cap < math.inf
    return rejects or algorithm.correction_level != "token" or algorithm.correction_normalized


def needs_old_logprobs(algorithm: AlgorithmConfig, distill: DistillConfig) -> bool:
    """Whether something is computed from the old policy's log-probs before the first update of a step."""
    # Advantages compare the teacher's log-probs with them.
    if distill.teacher:
        return True
    # In steps that train the critic alone, the policy makes no other pass.
    if algorithm.advantage_baseline == "critic":
        return True
    return algorithm.kl_in == "reward" or corrects_beyond_tokens(algorithm)


def skips_old_pass(algorithm: AlgorithmConfig, distill: DistillConfig) -> bool:
    """Whether the old policy's log-probs need no pass: a step's single update begins at that policy itself."""
    return algorithm.epochs * algorithm.mini_batches == 1 and not needs_old_logprobs(algorithm, distill)


def last_stage(algorithm: AlgorithmConfig, distill: DistillConfig) -> str:
    """Name of the last stage of a run that trains a policy: grpo, ppo or distill."""
    if algorithm.advantage_baseline == "critic":
        return "ppo"
    return "distill" if distill.teacher else "grpo"


def read_steps(text: str) -> range:
    """Parses a range of steps FIRST:LAST, both included; FIRST alone is one step.

    Raises:
        InputError: The text is not a range, or the range is empty.
    """
    match = re.fullmatch(r"\s*(\d{1,12})\s*(?::\s*(\d{1,12})\s*)?", text, re.ASCII)
    if match is None:
        raise InputError(repr(text), "not a range of steps", "write FIRST:LAST, such as 3:5, or one step")
    first, last = int(match[1]), int(match[2] or match[1])
    if first < 1:
        raise InputError(repr(text), "begins before the first step", "begin at 1 or later")
    if last < first:
        raise InputError(repr(text), "the last step comes before the first", f"write {last}:{first}")
    return range(first, last + 1)
