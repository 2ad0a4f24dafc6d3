"""The row operations of `rows.py` as Triton kernels; same signatures, same results within rounding.

A program processes rows, not tiles: a row's result does not depend on the number of rows, and there are no atomic sums.
Each lane (the elements of one 16-byte load) keeps its own maximum and sums, so that the loop over a row has no barrier
and takes one exponential per element and one per load; lanes are merged at the row's end, in a fixed order.

Passes over the logits: `row_stats` reads once. `row_gradient_` reads and writes once. `grpo_rows_` reads, reads again
and writes; few enough rows are in flight that the second read should hit the L2 cache.

Recompiled only for a dtype, the presence of an argument, and divisibility by 16 of width and stride.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import astuple, dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels import launch
from grpo_kernels.options import LossOptions
from grpo_kernels.token_loss import Tokens

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
# 2^FLOOR is 0 in float32; clamping a shift here avoids 0 * -inf = NaN in the sums.
FLOOR: tl.constexpr = tl.constexpr(-300.0)
SATURATED: tl.constexpr = tl.constexpr(30.0)  # as in token_loss.py

OUTPUTS = 7
"""Number of outputs of a row that `grpo_kernel` writes: the fields of `RowLosses`."""
L2_SHARE = 0.75
"""Share of the L2 cache that the rows in flight may fill."""
STATS_AT_ONCE, GRADIENT_AT_ONCE, GRPO_AT_ONCE = 6, 5, 4
"""Number of programs of 8 warps that share a multiprocessor; `registers_for` limits each thread's registers
accordingly."""


# ------------------------------------------------------------------------------------------------ one row


@triton.jit
def _add(x, m, s, w, scale, LANES: tl.constexpr, LANE: tl.constexpr):
    """Adds [LANES * LANE] logits to the lanes' maxima m, sums s and w, each [LANES]; w in units of log 2."""
    x = tl.reshape(x.to(tl.float32), [LANES, LANE])
    peak = tl.maximum(m, tl.max(x, 1))
    base = tl.where(peak == -float("inf"), 0.0, peak)
    shift = tl.maximum((m - base) * scale, FLOOR)
    # Subtracted first, which is exact for logits that are close to each other.
    d = (x - base[:, None]) * scale
    e = tl.exp2(d)
    decay = tl.exp2(shift)
    w = (w + shift * s) * decay + tl.sum(tl.where(e > 0, d * e, 0.0), 1)
    return peak, s * decay + tl.sum(e, 1), w


@triton.jit
def _row_sums(row, columns, scale, AGAIN: tl.constexpr, BLOCK: tl.constexpr, LANE: tl.constexpr):
    """m, s and w of the `columns` logits at `row`; `rows.row_stats` defines them. AGAIN: they are reread."""
    # Rows that are read again should stay in the L2 cache; others should not displace them.
    POLICY: tl.constexpr = "evict_last" if AGAIN else "evict_first"
    LANES: tl.constexpr = BLOCK // LANE
    offsets = tl.arange(0, BLOCK)
    m = tl.full([LANES], -float("inf"), tl.float32)
    s = tl.zeros([LANES], tl.float32)
    w = tl.zeros([LANES], tl.float32)
    whole = columns // BLOCK * BLOCK
    # Whole blocks without a mask, which would split the loads.
    for start in range(0, whole, BLOCK):
        x = tl.load(row + start + offsets, eviction_policy=POLICY)
        m, s, w = _add(x, m, s, w, scale, LANES, LANE)
    if whole < columns:
        column = whole + offsets
        x = tl.load(row + column, mask=column < columns, other=-float("inf"), eviction_policy=POLICY)
        m, s, w = _add(x, m, s, w, scale, LANES, LANE)
    peak = tl.max(m, 0)
    shift = tl.maximum((m - tl.where(peak == -float("inf"), 0.0, peak)) * scale, FLOOR)
    decay = tl.exp2(shift)
    return peak, tl.sum(s * decay, 0), tl.sum((w + shift * s) * decay, 0) * LN_2


@triton.jit
def _target(row, target, columns):
    """The target's raw logit, -inf when the target is not among these columns."""
    here = (target >= 0) & (target < columns)
    return tl.load(row + target, mask=here, other=-float("inf")).to(tl.float32)


@triton.jit
def _gradient(x, column, target, m, log2_s, entropy, grad_logprob, grad_entropy, scale, ENTROPY: tl.constexpr):
    log2_p = (x.to(tl.float32) - m) * scale - log2_s
    p = tl.exp2(log2_p)
    gradient = tl.where(column == target, grad_logprob, 0.0) - grad_logprob * p
    if ENTROPY:
        gradient -= tl.where(p > 0, grad_entropy * p * (log2_p * LN_2 + entropy), 0.0)
    return gradient


@triton.jit
def _write_gradient(
    row, out, target, columns, width, m, s, entropy, grad_logprob, grad_entropy, inv_temperature,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of the logits at `row` to `out`, which may be the same; 0 from `columns` to `width`."""
    scale = inv_temperature * LOG2_E
    log2_s = tl.log2(s)
    grad_logprob *= inv_temperature
    grad_entropy *= inv_temperature
    offsets = tl.arange(0, BLOCK)
    whole = columns // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        column = start + offsets
        x = tl.load(row + column, eviction_policy="evict_first")
        g = _gradient(x, column, target, m, log2_s, entropy, grad_logprob, grad_entropy, scale, ENTROPY)
        tl.store(out + column, g.to(out.dtype.element_ty))
    for start in range(whole, width, BLOCK):
        column = start + offsets
        x = tl.load(row + column, mask=column < columns, other=-float("inf"))
        g = _gradient(x, column, target, m, log2_s, entropy, grad_logprob, grad_entropy, scale, ENTROPY)
        tl.store(out + column, tl.where(column < columns, g, 0.0).to(out.dtype.element_ty), mask=column < width)


@triton.jit
def _write_zeros(out, width, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    zeros = tl.zeros([BLOCK], out.dtype.element_ty)
    whole = width // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        tl.store(out + start + offsets, zeros)
    if whole < width:
        tl.store(out + whole + offsets, zeros, mask=whole + offsets < width)


@triton.jit
def _visit(index, i, MODE: tl.constexpr):
    """Row and token of the i-th step (`launch.Visit`), both int64."""
    # The offset of a row, row * stride, exceeds 2^31 in large tensors.
    step = tl.cast(i, tl.int64)
    if MODE == 0:
        return step, step
    if MODE == 1:
        return tl.load(index + step), step
    return step, tl.load(index + step)


# ------------------------------------------------------------------------------------------------ one token


@triton.jit
def _exp_tail(x):
    """exp(x) - 1 - x, as x^2 (1/2 + x/6 + ...) where the terms would cancel."""
    # Terms up to x^10: for |x| = 0.5 the next one is 1e-10 of the result, far below float32's rounding.
    series = 1 / 40320 + x * (1 / 362880 + x * (1 / 3628800))
    series = 0.5 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720 + x * (1 / 5040 + x * series)))))
    return tl.where(tl.abs(x) < 0.5, x * x * series, tl.exp(x) - 1.0 - x)


@triton.jit
def _corrected(advantage, weight, log_correction, floor, cap, correction):
    """Advantage and weight after correction 1 (truncate) or 2 (mask), as in `token_loss._corrected`."""
    c = tl.exp(log_correction)
    # False for NaN, which must be kept.
    beyond = (c < floor) | (c > cap)
    kept = tl.where(beyond, tl.where(correction == 2, 0.0, tl.where(c > cap, cap, floor)), c)
    return advantage * kept, tl.where(beyond & (correction == 2), 0.0, weight)


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)), without overflow for any x."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x > 0, 1.0, e) / (1.0 + e)


@triton.jit
def _policy_term(logprob, log_ratio, advantage, log_low, log_high, log_dual, tau_pos, tau_neg, kind):
    """Loss, its derivative by the log-prob and the bound that binds, as in `token_loss._policy_term`."""
    # `tl.where` throughout: `tl.minimum` and `tl.maximum` would replace a NaN by the bound, but it must reach the loss.
    cispo = kind == 1
    sapo = kind == 2
    falls, rises = advantage < 0, advantage > 0
    below, above, far = log_ratio < log_low, log_ratio > log_high, log_ratio > log_dual
    capped = tl.where(above, log_high, log_ratio)
    if_falling = tl.where(below, log_low, tl.where(far, log_dual, log_ratio))
    bounded = tl.where(cispo, tl.where(below, log_low, capped), tl.where(falls, if_falling, capped))
    surrogate = -advantage * tl.exp(bounded)
    side = tl.where(below, 1.0, tl.where(above, 2.0, 0.0))
    if_ppo = tl.where(falls, tl.where(below, 1.0, tl.where(far, 3.0, 0.0)), tl.where(rises & above, 2.0, 0.0))
    clipped = tl.where(cispo, tl.where(falls | rises, side, 0.0), if_ppo)
    loss = tl.where(cispo, tl.where((advantage == 0) & (logprob == float("-inf")), 0.0, surrogate * logprob), surrogate)
    grad = tl.where(cispo | (clipped == 0), surrogate, 0.0)

    tau = tl.where(rises, tau_pos, tau_neg)
    ratio = tl.exp(tl.where(log_ratio > SATURATED, SATURATED, log_ratio))
    gate = _sigmoid(tau * (ratio - 1.0))
    soft_grad = -4.0 * advantage * gate * _sigmoid(tau * (1.0 - ratio)) * ratio
    loss = tl.where(sapo, -4.0 * advantage / tau * gate, loss)
    return loss, tl.where(sapo, soft_grad, grad), tl.where(sapo, 0.0, clipped)


@triton.jit
def _kl(logprob, ref, kind):
    """Estimate of KL(policy || reference) and its derivative by the log-prob, as in `token_loss._kl`."""
    d = logprob - ref
    k3 = _exp_tail(-d)
    k3_derivative = tl.where(tl.abs(d) < 0.5, d - k3, 1.0 - tl.exp(-d))
    estimate = tl.where(kind == 1, d, tl.where(kind == 2, 0.5 * d * d, k3))
    return estimate, tl.where(kind == 1, 1.0, tl.where(kind == 2, d, k3_derivative))


# ------------------------------------------------------------------------------------------------ kernels


# `count` changes with every batch. Triton would compile variants for a count of 1 and for multiples of 16.
@triton.jit(do_not_specialize=["count"])
def stats_kernel(
    logits, ids, index, out, count, stride, columns, inv_temperature,
    MODE: tl.constexpr, BLOCK: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """Kernel of `rows.row_stats`; writes row i of `out` [count, 4] for the i-th row."""
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        row, token = _visit(index, i, MODE)
        pointer = logits + row * stride
        m, s, w = _row_sums(pointer, columns, inv_temperature * LOG2_E, False, BLOCK, LANE)
        entry = out + token * 4
        tl.store(entry, m)
        tl.store(entry + 1, s)
        tl.store(entry + 2, w)
        tl.store(entry + 3, _target(pointer, tl.load(ids + token), columns))


@triton.jit(do_not_specialize=["count"])
def gradient_kernel(
    logits, out, ids, index, stats, grad_logprob, grad_entropy,
    count, stride, out_stride, columns, width, inv_temperature,
    MODE: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Kernel of `rows.row_gradient_`."""
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        row, token = _visit(index, i, MODE)
        g = tl.load(grad_logprob + token, mask=token >= 0, other=0.0)
        h = tl.load(grad_entropy + token, mask=token >= 0, other=0.0) if ENTROPY else 0.0
        if (g == 0) & (h == 0):
            _write_zeros(out + row * out_stride, width, BLOCK)
        else:
            entry = stats + token * 4
            m, s, w = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
            _write_gradient(
                logits + row * stride, out + row * out_stride, tl.load(ids + token), columns, width,
                m, s, tl.log(s) - w / s, g, h, inv_temperature, ENTROPY, BLOCK,
            )  # fmt: skip


@triton.jit(do_not_specialize=["count", "kind", "kl", "kl_unbiased", "correction"])
def grpo_kernel(
    logits, out, ids, index, old, ref, rollout, advantage, weight, outputs,
    count, stride, out_stride, columns, width, inv_temperature,
    log_low, log_high, log_dual, tau_pos, tau_neg, kl_coef, entropy_coef, correction_floor, correction_cap,
    kind, kl, kl_unbiased, correction, grad_scale,
    MODE: tl.constexpr, HAS_OLD: tl.constexpr, HAS_REF: tl.constexpr, HAS_ROLLOUT: tl.constexpr,
    ENTROPY: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """Kernel of `rows.grpo_rows_`; `outputs` is [n, 7], initialized with zeros."""
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        row, token = _visit(index, i, MODE)
        pointer = logits + row * stride
        factor = tl.load(weight + token, mask=token >= 0, other=0.0)
        if factor == 0:
            if GRADIENT:
                _write_zeros(out + row * out_stride, width, BLOCK)
        else:
            target = tl.load(ids + token)
            target_logit = _target(pointer, target, columns)
            m, s, w = _row_sums(pointer, columns, inv_temperature * LOG2_E, GRADIENT, BLOCK, LANE)
            log_s = tl.log(s)
            logprob = (target_logit - m) * inv_temperature - log_s
            entropy = log_s - w / s

            before = tl.load(old + token) if HAS_OLD else logprob
            log_ratio = logprob - before if HAS_OLD else tl.where(logprob == logprob, 0.0, logprob)
            a = tl.load(advantage + token)
            if HAS_ROLLOUT:
                log_correction = before - tl.load(rollout + token)
                a, factor = _corrected(a, factor, log_correction, correction_floor, correction_cap, correction)
            loss, g, clipped = _policy_term(logprob, log_ratio, a, log_low, log_high, log_dual, tau_pos, tau_neg, kind)
            entry = outputs + token * 7
            if HAS_REF:
                estimate, derivative = _kl(logprob, tl.load(ref + token), kl)
                ratio = tl.exp(log_ratio)
                by_kl = tl.where(kl_unbiased != 0, ratio * estimate, estimate)
                g_kl = tl.where(kl_unbiased != 0, ratio * (estimate + derivative), derivative)
                loss += tl.where(kl_coef == 0, 0.0, kl_coef * by_kl)  # 0 * inf is no loss
                g += tl.where(kl_coef == 0, 0.0, kl_coef * g_kl)
                tl.store(entry + 3, estimate)
            if ENTROPY:
                loss -= entropy_coef * entropy

            tl.store(entry, tl.where(factor == 0, 0.0, loss * factor))  # a masked token's loss may be NaN
            tl.store(entry + 1, logprob)
            tl.store(entry + 2, entropy)
            tl.store(entry + 4, tl.where(factor == 0, 0.0, clipped))
            tl.store(entry + 5, factor)
            tl.store(entry + 6, log_ratio)
            if GRADIENT:
                # Every thread must read the target's logit before one of them overwrites it.
                tl.debug_barrier()
                if factor == 0:
                    _write_zeros(out + row * out_stride, width, BLOCK)
                else:
                    factor *= grad_scale
                    _write_gradient(
                        pointer, out + row * out_stride, target, columns, width,
                        m, s, entropy, g * factor, -entropy_coef * factor, inv_temperature, ENTROPY, BLOCK,
                    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ launches


@dataclass(frozen=True)
class Shape:
    """Launch configuration of a kernel.

    Attributes:
        programs: Number of programs; each processes every `programs`-th row.
        warps: Warps (32 threads) of each program.
        registers: Limit of registers per thread. Without it the compiler spills, or uses too many.
        block: Elements that a program processes at a time: two loads of 16 bytes per thread.
        lane: Elements of one such load.
    """

    programs: int
    warps: int
    registers: int
    block: int
    lane: int


def shape_of(logits: Tensor, count: int, columns: int, at_once: int, reread: bool) -> Shape:
    """Launch with `at_once` programs of 8 warps per multiprocessor; for `reread`, at most what fits the L2 cache."""
    # Triton's interpreter, in tests.
    if not logits.is_cuda:
        return _shape(logits, min(count, 8), 8, at_once)
    device = torch.cuda.get_device_properties(logits.device)
    bytes_each = device.multi_processor_count * max(columns, 1) * logits.element_size()
    fitting = int(L2_SHARE * device.L2_cache_size / bytes_each) if reread else at_once
    # With one program for each multiprocessor, that one must keep it busy: 32 warps instead of 8.
    if fitting < 2:
        return _shape(logits, min(count, device.multi_processor_count), 32, 1)
    return _shape(logits, min(count, min(fitting, at_once) * device.multi_processor_count), 8, at_once)


def _shape(logits: Tensor, programs: int, warps: int, at_once: int) -> Shape:
    lane = 16 // logits.element_size()
    return Shape(programs, warps, registers_for(warps, at_once), block=warps * 32 * 2 * lane, lane=lane)


def registers_for(warps: int, at_once: int) -> int:
    """Registers per thread: its share of a multiprocessor's 65536, which are allocated in multiples of eight."""
    return 65536 // (at_once * warps * 32) // 8 * 8


def row_stats(logits: Tensor, ids: Tensor, rows: Tensor | None, columns: int, inv_temperature: float) -> Tensor:
    """Triton implementation of `rows.row_stats`."""
    stats = torch.empty(len(ids), 4, dtype=torch.float32, device=logits.device)
    if len(ids):
        index, mode = (ids, launch.EVERY_ROW) if rows is None else (rows, launch.LISTED_ROWS)
        shape = shape_of(logits, len(ids), columns, STATS_AT_ONCE, reread=False)
        arguments = (logits, ids, index, stats, len(ids), logits.stride(0), columns, inv_temperature)
        _launch("row_stats", stats_kernel, shape, *arguments, MODE=mode, BLOCK=shape.block, LANE=shape.lane)
    return stats


def row_gradient_(
    logits: Tensor,
    ids: Tensor,
    rows: Tensor | None,
    columns: int,
    inv_temperature: float,
    stats: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    others: str,
    out: Tensor | None = None,
) -> None:
    """Triton implementation of `rows.row_gradient_`."""
    out = logits if out is None else out
    visit = launch.visit(out, ids, rows, columns, others)
    if not visit.count or not visit.width:
        return
    shape = shape_of(logits, visit.count, columns, GRADIENT_AT_ONCE, reread=False)
    entropy = grad_logprob if grad_entropy is None else grad_entropy
    _launch(
        "row_gradient_", gradient_kernel, shape,
        logits, out, ids, visit.index, stats, grad_logprob, entropy,
        visit.count, logits.stride(0), out.stride(0), columns, visit.width, inv_temperature,
        MODE=visit.mode, ENTROPY=grad_entropy is not None, BLOCK=shape.block,
    )  # fmt: skip


def grpo_rows_(
    logits: Tensor,
    ids: Tensor,
    rows: Tensor | None,
    columns: int,
    inv_temperature: float,
    tokens: Tokens,
    options: LossOptions,
    with_gradient: bool,
    others: str,
    out: Tensor | None = None,
    grad_scale: float = 1.0,
) -> Tensor:
    """Triton implementation of `rows.grpo_rows_`, in one launch."""
    outputs = torch.zeros(len(ids), OUTPUTS, dtype=torch.float32, device=logits.device)
    out = logits if out is None else out
    visit = launch.visit(out, ids, rows, columns, others if with_gradient else "leave")
    if not visit.count or not visit.width:
        return outputs
    shape = shape_of(logits, visit.count, columns, GRPO_AT_ONCE, reread=with_gradient)
    rollout = None if options.correction == "none" else tokens.rollout
    # A kernel takes no None: another vector stands for it, and a constant says that it is not read.
    optional = [tokens.advantage if vector is None else vector for vector in (tokens.old, tokens.ref, rollout)]
    _launch(
        "grpo_rows_", grpo_kernel, shape,
        logits, out, ids, visit.index, *optional, tokens.advantage, tokens.weight, outputs,
        visit.count, logits.stride(0), out.stride(0), columns, visit.width, inv_temperature,
        *astuple(launch.scalars(options)), grad_scale,
        MODE=visit.mode, HAS_OLD=tokens.old is not None, HAS_REF=tokens.ref is not None,
        HAS_ROLLOUT=rollout is not None, ENTROPY=options.entropy_coef != 0, GRADIENT=with_gradient,
        BLOCK=shape.block, LANE=shape.lane,
    )  # fmt: skip
    return outputs


def _launch(operation: str, kernel: Any, shape: Shape, *arguments: Any, **constants: Any) -> None:
    """Launches a kernel on the tensors' device, even if it is not the current one; vectors may have any stride."""
    logits, *rest = arguments
    rest = [value.contiguous() if isinstance(value, Tensor) and value.dim() == 1 else value for value in rest]
    with torch.cuda.device(logits.device) if logits.is_cuda else nullcontext(), launch.named(operation):
        kernel[(shape.programs,)](logits, *rest, **constants, num_warps=shape.warps, maxnreg=shape.registers)
