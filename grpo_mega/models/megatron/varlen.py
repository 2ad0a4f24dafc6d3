"""Attention of runs of any length by flash attention kernels, with shared prompts as a cascade and sinks, exactly.

A query's keys are in one or two calls (`runs.py`), and a sink is one more key, with a learned logit and no value.
Softmax over all of them follows from the parts: with the output o_p and the log-sum-exp l_p of the logits of each part,

    l = log sum_p exp(l_p),    o = sum_p exp(l_p - l) o_p,

where a sink contributes to l only. The kernels' log-sum-exp has no gradient, and needs none. Flash attention's backward
pass (Dao, 2023, arXiv 2307.08691, algorithm 2) recomputes probabilities from the log-sum-exp that it is given,
P_ij = exp(s_ij - l_i), and from these and the output the gradient of the logits, dS_ij = P_ij (do_i v_j - D_i) with
D_i = do_i o_i. Given the merged o and l, each call therefore computes its part of the gradients of softmax over all
keys: keys and values get the gradients of their own call, a query the sum over its calls. A sink's gradient is
-sum_i exp(sink - l_i) D_i. So the backward pass makes the same calls, and computes nothing twice.

The kernels are those of torch's `_flash_attention_forward` and `_flash_attention_backward`: FlashAttention-2, which
every CUDA build of torch has, or FlashAttention-3 or 4, which torch uses instead once they are installed and activated.
They are called as by `torch.nn.attention.varlen` of torch 2.11, whose own function cannot be used: it silently drops
the gradient of the log-sum-exp, and its backward pass does not accept another output.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl

from grpo_mega.config.derived import attention_on_gpu
from grpo_mega.config.schema import LayoutConfig, ModelConfig
from grpo_mega.errors import InputError
from grpo_mega.models.megatron.runs import AttentionCall

PACKAGES = {"flash3": ("FA3", "flash_attn_interface", (9,)), "flash4": ("FA4", "flash_attn.cute", (9, 10))}
"""Value of `layout.attention` -> torch's name of the kernel, the module that it comes from, and the GPUs that it
supports, as major numbers of their compute capability."""
CHANNELS = 8
"""The number of channels of FlashAttention's heads is a multiple of this."""


def is_installed(kernel: str) -> bool:
    """Whether the module that a kernel of `PACKAGES` comes from is installed; it is not imported."""
    try:
        return importlib.util.find_spec(PACKAGES[kernel][1]) is not None
    except ImportError:
        # Looking for a submodule imports its package, which may fail.
        return False


def choose(layout: LayoutConfig, model: ModelConfig, device: torch.device) -> str:
    """Chooses what computes attention on this device: "padded" for tables, or a kernel, which `attend` then uses.

    Raises:
        InputError: The kernel of `layout.attention` is not installed, or does not support this device.
    """
    cuda = device.type == "cuda"
    chosen = attention_on_gpu(layout, model) if cuda else layout.attention.replace("auto", "padded")
    if chosen == "padded":
        return chosen
    where = f"layout.attention={chosen}"
    # A CPU may have the operation: tests register one.
    if not cuda and not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_flash_attention_forward", "CPU"):
        raise InputError(where, "needs a GPU, and this is a CPU", "set layout.attention=auto")
    if chosen in PACKAGES:
        name, module, made_for = PACKAGES[chosen]
        if cuda and torch.cuda.get_device_capability(device)[0] not in made_for:
            what = f"does not support {torch.cuda.get_device_name(device)}"
            raise InputError(where, what, "set layout.attention=torch")
        if current_flash_attention_impl() != name:
            try:
                activate_flash_attention_impl(name)
            except Exception as error:
                # Another package may raise anything.
                what = f"needs {module}, which cannot be used: {error}"
                raise InputError(where, what, "install it, or set layout.attention=torch") from error
    return chosen


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    calls: Sequence[AttentionCall],
    scale: float | None,
) -> torch.Tensor:
    """Attention of rows here over rows of all; rows that are in no call get 0.

    Args:
        query: [T', heads, channels].
        key: [T, kv heads, channels], every one of which serves heads / kv heads queries.
        value: [T, kv heads, value channels].
        sinks: [heads] logits that take part in every softmax; or None.
        calls: Which rows attend to which. Those that are not causal are about rows of earlier ones.
        scale: Factor of the logits; None for channels ** -0.5.

    Returns:
        [T', heads, value channels].
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    channels, outputs = query.shape[-1], value.shape[-1]
    wide = channels + -channels % CHANNELS
    # FlashAttention-2 has one size for keys and values. Zeros change neither logits nor other channels of the output.
    wide_value = outputs + -outputs % CHANNELS
    if current_flash_attention_impl() is None:
        wide = wide_value = max(wide, wide_value)
    query, key = (F.pad(x, (0, wide - channels)) if wide > channels else x for x in (query, key))
    value = F.pad(value, (0, wide_value - outputs)) if wide_value > outputs else value
    return _Attention.apply(query, key, value, sinks, calls, scale)[..., :outputs]


class _Attention(torch.autograd.Function):
    """Autograd function that merges all calls of one layer; see the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        calls: Sequence[AttentionCall],
        scale: float,
    ) -> torch.Tensor:
        # The kernels take rows at any distance, but adjacent channels.
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        out = query.new_zeros(*query.shape[:2], value.shape[2])
        lse: torch.Tensor | None = None  # [heads, T']
        for call in calls:
            rows = (query[call.rows], key[call.keys], value[call.keys])
            part, part_lse, *_ = torch.ops.aten._flash_attention_forward(
                *rows, *_lengths(call), 0.0, call.causal, False, scale=scale, **_window(call)
            )
            if lse is None:
                lse = part_lse.new_full((query.shape[1], len(query)), -torch.inf)
            # A causal call is the first to write its rows; any other merges the prompt into rows of an earlier call.
            if call.causal:
                out[call.rows], lse[:, call.rows] = part, part_lse
            else:
                both = torch.logaddexp(lse[:, call.rows], part_lse)
                kept, added = _per_row(lse[:, call.rows] - both), _per_row(part_lse - both)
                out[call.rows] = (out[call.rows] * kept + part * added).to(out.dtype)
                lse[:, call.rows] = both
        if sinks is not None and lse is not None:
            with_sinks = torch.logaddexp(lse, sinks[:, None].to(lse.dtype))
            out = (out * _per_row(lse - with_sinks)).to(out.dtype)
            lse = with_sinks
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.calls, ctx.scale = calls, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        to_query, to_key, to_value = (torch.zeros_like(x) for x in (query, key, value))
        # Among gathered keys a row occurs several times, and its gradients add up; in float32, so as to round once.
        if any(torch.is_tensor(call.keys) for call in ctx.calls):
            to_key, to_value = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (to_key, to_value))
        for call in ctx.calls:
            # The merged output and log-sum-exp, not those of the call: with these a call computes its part of the whole
            # gradient.
            asking = grad[call.rows], query[call.rows], out[call.rows], lse[:, call.rows].contiguous()
            parts = _backward(asking, (key[call.keys], value[call.keys]), call, ctx.scale)
            to_query[call.rows] += parts[0]
            for total, part in ((to_key, parts[1]), (to_value, parts[2])):
                if torch.is_tensor(call.keys):
                    total.index_add_(0, call.keys, part.to(total.dtype))
                else:
                    total[call.keys] += part
        to_sinks = None
        if sinks is not None:
            to_sinks = torch.zeros_like(sinks)
            if lse is not None:
                products = (grad.to(lse.dtype) * out).sum(-1).T  # D of the docstring, [heads, T']
                shares = (sinks[:, None].to(lse.dtype) - lse).exp()
                to_sinks = -(shares * products).sum(-1).to(sinks.dtype)
        return to_query, to_key.to(key.dtype), to_value.to(value.dtype), to_sinks, None, None


def _per_row(logarithms: torch.Tensor) -> torch.Tensor:
    """Factors of outputs, [rows, heads, 1], from their logarithms [heads, rows]."""
    return logarithms.exp().T[..., None]


def _backward(
    asking: tuple[torch.Tensor, ...], asked: tuple[torch.Tensor, torch.Tensor], call: AttentionCall, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of a call's queries, keys and values, summed in a fixed order under torch's deterministic algorithms.

    Args:
        asking: Gradient of the outputs, queries, outputs, and log-sum-exp of the call's rows, over all their keys.
        asked: Keys and values.
        call, scale: See `attend`.
    """
    grad, query, out, lse = asking
    # The operation takes the random state of a dropout, also when there is none.
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
    return torch.ops.aten._flash_attention_backward(
        *(grad, query, *asked, out, lse, *_lengths(call), 0.0, call.causal, *no_dropout), scale=scale, **_window(call)
    )


def _lengths(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    # FlashAttention-2 arranges sequences of one query each in another way, whose log-sum-exp has another order.
    return call.query_starts, call.key_starts, max(2, call.most_queries), call.most_keys


def _window(call: AttentionCall) -> dict[str, int]:
    """A window for the kernel, which counts tokens before and after the query. torch 2.11 accepts none with FA4."""
    return {} if call.window is None else {"window_size_left": call.window - 1, "window_size_right": 0}
