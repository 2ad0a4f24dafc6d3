"""Validates arguments before a launch; every message names the argument and the expected value.

Values on a GPU are checked there without synchronization: a bad one causes a device-side assertion.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels.options import SEQUENCE_KINDS, LossOptions
from grpo_kernels.token_loss import Tokens

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def require_logits(logits: Tensor) -> None:
    """Requires [N, V] logits of a supported dtype whose rows do not overlap and whose columns are adjacent."""
    _require_tensor("logits", logits, 2, DTYPES)
    rows, columns = logits.stride()
    apart = rows >= logits.shape[1] or logits.shape[0] <= 1
    if logits.numel() and not (apart and (columns == 1 or logits.shape[1] == 1)):
        raise ValueError(
            f"logits has strides {logits.stride()}; rows must not overlap and their columns must be adjacent "
            "(stride 1): pass logits.contiguous()"
        )


def require_linear(hidden: Tensor, output_weight: Tensor) -> None:
    """Requires [n, H] hidden states and the [V, H] output weight, on one device."""
    _require_tensor("hidden", hidden, 2, DTYPES)
    # No float16: gradients that are made in the forward pass would miss its loss scale.
    _require_tensor("output_weight", output_weight, 2, DTYPES[:2])
    _require_device("output_weight", output_weight, hidden.device)
    if hidden.shape[1] != output_weight.shape[1]:
        raise ValueError(
            f"hidden is {list(hidden.shape)} and output_weight {list(output_weight.shape)}; both need H columns"
        )


def require_main_grad(main_grad: Tensor | None, output_weight: Tensor, grad_scale: float) -> None:
    """Requires a float32 accumulator of the output weight's shape, or None."""
    if main_grad is None:
        return
    _require_tensor("main_grad", main_grad, 2, (torch.float32,))
    _require_device("main_grad", main_grad, output_weight.device)
    if main_grad.shape != output_weight.shape:
        raise ValueError(
            f"main_grad is {list(main_grad.shape)}; it needs the shape of output_weight, {list(output_weight.shape)}"
        )
    if not (math.isfinite(grad_scale) and grad_scale != 0):
        raise ValueError(f"grad_scale is {grad_scale}; use the finite number that the loss will be multiplied by")


def require_rows(rows: Tensor | None, logits: Tensor) -> None:
    """Requires [n] indices of rows of the logits, each at most once."""
    if rows is None:
        return
    _require_tensor("rows", rows, 1, (torch.int64,))
    _require_device("rows", rows, logits.device)
    total = len(logits)
    _require_values(_inside(rows, total), f"rows has a number outside [0, {total}), the rows of logits")
    times = torch.zeros(total, dtype=torch.int64, device=rows.device)
    times.index_add_(0, rows.clamp(0, max(total - 1, 0)), torch.ones_like(rows))
    _require_values(times <= 1, "rows lists a row twice, but its gradient is stored once: list every row once")


def require_ids(ids: Tensor, count: int, device: torch.device, vocab_size: int) -> None:
    """Requires [n] global token ids."""
    _require_tensor("ids", ids, 1, (torch.int64,))
    _require_device("ids", ids, device)
    _require_length("ids", ids, count)
    _require_values(_inside(ids, vocab_size), f"ids has a token outside [0, {vocab_size}), the vocabulary")


def require_tokens(tokens: Tokens, options: LossOptions, count: int, device: torch.device) -> None:
    """Requires the [n] float vectors used by the options."""
    if not isinstance(options, LossOptions):
        raise TypeError(f"options is a {type(options).__name__}; pass a LossOptions")
    vectors = {"advantages": tokens.advantage, "token_weight": tokens.weight}
    optional = {"old_logprob": tokens.old, "ref_logprob": tokens.ref, "rollout_logprob": tokens.rollout}
    for name, vector in (vectors | {name: vector for name, vector in optional.items() if vector is not None}).items():
        _require_tensor(name, vector, 1, (torch.float32,))
        _require_device(name, vector, device)
        _require_length(name, vector, count)
        if vector.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires a gradient, and the loss gives it none; pass {name}.detach()")
    if options.kl_coef and tokens.ref is None:
        raise ValueError(f"ref_logprob is None, and options.kl_coef is {options.kl_coef}; pass it or set kl_coef to 0")
    if options.correction != "none" and tokens.rollout is None:
        raise ValueError(f"rollout_logprob is None, and options.correction is {options.correction!r}; pass it")
    if options.off_policy_mask is not None and tokens.rollout is None:
        raise ValueError(f"rollout_logprob is None, and options.off_policy_mask is {options.off_policy_mask}; pass it")
    whole = f"goes with options.kind {', '.join(SEQUENCE_KINDS)} or options.off_policy_mask, and with no other"
    if options.per_sequence != (tokens.cu_seqlens is not None):
        raise ValueError(f"cu_seqlens {whole}")
    if tokens.sequence_group is not None and not options.per_sequence:
        raise ValueError(f"sequence_group {whole}")
    if tokens.sampled is not None:
        _require_tensor("sampled", tokens.sampled, 1, (torch.bool,))
        _require_device("sampled", tokens.sampled, device)
        _require_length("sampled", tokens.sampled, count)
        if options.off_policy_mask is None:
            raise ValueError("sampled goes with options.off_policy_mask; pass None without it")
    if tokens.cu_seqlens is not None:
        _require_sequences(tokens.cu_seqlens, count, device)


def require_temperature(temperature: float) -> None:
    """Requires a positive temperature whose inverse is finite in float32."""
    if not (1e-6 <= temperature <= 1e6):
        raise ValueError(f"temperature is {temperature}; use a number between 1e-6 and 1e6")


def require_group(group: dist.ProcessGroup | None, name: str = "group") -> None:
    """Requires a process group that this rank belongs to, or None."""
    if group is None:
        return
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{name} is {group!r}; pass a torch.distributed.ProcessGroup that this rank is a member of")
    if not dist.is_initialized() or group.rank() < 0:
        raise ValueError(f"{name} is not initialised on this rank; call torch.distributed.init_process_group first")


def require_one_of(name: str, value: object, known: tuple[object, ...]) -> None:
    """Requires one of the `known` values."""
    if value not in known:
        raise ValueError(f"{name} is {value!r}; use one of {', '.join(map(str, known))}")


def require_chunk(chunk: int | None) -> None:
    """Requires a positive number of rows per chunk, or None."""
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}; use a positive number of rows, or None")


def _require_sequences(cu_seqlens: Tensor, count: int, device: torch.device) -> None:
    _require_tensor("cu_seqlens", cu_seqlens, 1, (torch.int64,))
    _require_device("cu_seqlens", cu_seqlens, device)
    if not len(cu_seqlens):
        raise ValueError("cu_seqlens is empty; it begins with 0")
    ends = torch.stack([cu_seqlens[0] == 0, cu_seqlens[-1] == count, (cu_seqlens.diff() >= 0).all()])
    _require_values(ends, f"cu_seqlens must begin with 0, never fall and end with {count}, the number of tokens")


def _require_tensor(name: str, value: Tensor, dimensions: int, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; pass a tensor")
    if value.dim() != dimensions:
        raise ValueError(f"{name} has shape {list(value.shape)}; it needs {dimensions} dimension(s)")
    if value.dtype not in dtypes:
        raise ValueError(f"{name} is {value.dtype}; use {' or '.join(str(dtype) for dtype in dtypes)}")


def _require_device(name: str, value: Tensor, device: torch.device) -> None:
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}; it must be on {device} with the others")


def _require_length(name: str, value: Tensor, count: int) -> None:
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries; it needs {count}, one per row that counts")


def _inside(values: Tensor, end: int) -> Tensor:
    return (values >= 0) & (values < end)


def _require_values(fine: Tensor, message: str) -> None:
    if fine.is_cuda:
        torch._assert_async(fine.all(), message)
    elif not fine.all():
        raise ValueError(message)
