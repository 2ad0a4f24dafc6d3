"""Features of GPT-OSS's layers (OpenAI, 2025, arXiv 2508.10925) that other models lack: sinks, and experts' biases.

A sink is a learned logit of a head that takes part in the softmax over the tokens that a query sees, and adds nothing
to the output.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

CHANNELS = 8
"""The number of a head's channels is padded to a multiple of this, so that torch's fused attention needs no copies."""


def new_sinks(config: Any) -> torch.nn.Parameter:
    """Uninitialised sinks, [heads of this tensor parallel rank]."""
    heads = config.num_attention_heads // parallel_state.get_tensor_model_parallel_world_size()
    device = torch.cuda.current_device()
    sinks = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype, device=device))
    # Otherwise Megatron takes the sinks for copies, and the gradient norm counts only those of the first rank.
    set_tensor_model_parallel_attributes(sinks, True, 0, 1)
    return sinks


def attend_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor | None,
    sinks: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    """Attention of queries [N, heads, Q, d] over keys and values [N, heads, K, ...], and a sink of every head [heads].

    `seen` is the mask, [..., Q, K]; without one it is causal. torch's fused attention has no sinks: here a sink is one
    more token, before all others, whose value is zero. An additional channel is 1 in every query; in the keys it is
    the sink, over `scale`, for that token and 0 for all others. In bf16 it is rounded once, unless `scale` is a power
    of two.
    """
    channels, outputs = query.shape[-1], value.shape[-1]
    scale = channels**-0.5 if scale is None else scale
    # The causal mask needs as many queries as keys, so there the sink has a query as well, whose output is cut off.
    first = int(seen is None)
    query = F.pad(query, (0, _more(channels), first, 0), value=1.0)
    key, value = F.pad(key, (0, _more(channels), 1, 0)), F.pad(value, (0, _more(outputs), 1, 0))
    key[:, :, 0, channels] = (sinks.float() / scale).to(key.dtype)
    seen = None if seen is None else F.pad(seen, (1, 0), value=True)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, is_causal=seen is None, scale=scale)
    return out[:, :, first:, :outputs]


def _more(channels: int) -> int:
    """Number of channels to add, at least one."""
    return CHANNELS - channels % CHANNELS


def mark_expert_biases(gpt: GPTModel) -> None:
    """Marks experts' biases so that their gradients are reduced and counted in the norm like those of experts' weights.

    A rank holds the whole bias of its experts. Megatron marks the bias like that of a dense layer, whose gradient is
    summed over tensor parallel ranks and counted on the first of them (docs/parity.md, defect 8).
    """
    for name, parameter in gpt.named_parameters():
        if ".experts." in name and "bias" in name:
            parameter.sequence_parallel = False
            parameter.tensor_model_parallel = True
