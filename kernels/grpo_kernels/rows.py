"""The row operations in plain torch, for any device; on a CPU they work on pieces that stay in the cache.

`triton_rows.py` has the same functions. All of them take

    logits           [N, >= columns] float32, bfloat16 or float16; the row stride may be larger, the last one is 1
    ids              [n] int64, the target's LOCAL column; outside [0, columns) when another shard holds it
    rows             [n] int64, the rows that count, each once; None for all N
    columns          how many leading columns are real; padding after them is never read
    inv_temperature  1 / temperature

and compute in float32, a row at a time: NaN in one row stays in that row. Differences are taken in the raw logits and
scaled afterwards, and the maximum and the logarithm of the sum are kept apart: their sum would round away 2^-24 of the
maximum, which is all of a log-prob's accuracy when the logits share a large offset.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from grpo_kernels import launch
from grpo_kernels.options import LossOptions
from grpo_kernels.token_loss import Tokens, token_losses

FLOOR = -200.0
"""exp(FLOOR) is 0 in float32: clamping a difference here avoids 0 * -inf = NaN in the sums."""

LOWEST = torch.finfo(torch.float32).min
"""Value subtracted from a row of only -inf, as -inf - -inf would be NaN."""


def row_stats(logits: Tensor, ids: Tensor, rows: Tensor | None, columns: int, inv_temperature: float) -> Tensor:
    """[n, 4] float32 (m, s, w, t) of every row, with d = (x - m) * inv_temperature for the row's logits x.

    m: the largest logit; s: sum of exp(d); w: sum of exp(d) * d, where x = -inf counts 0; t: the target's logit, -inf
    when another shard holds it. A row of only -inf has m = -inf, s = w = 0.
    """
    with launch.named("row_stats"):
        return _stats(logits, ids, rows, columns, inv_temperature)


def logprob_and_entropy(stats: Tensor, inv_temperature: float) -> tuple[Tensor, Tensor]:
    """[n] log-prob of the target and [n] entropy, from the statistics of whole rows (merged over all shards)."""
    m, s, w, t = stats.unbind(-1)
    log_s = s.log()
    return (t - m) * inv_temperature - log_s, log_s - w / s


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
    """Overwrites the logits with the gradient of sum(grad_logprob * logprob + grad_entropy * entropy):

        inv_temperature * (grad_logprob * (1[target] - p) - grad_entropy * p * (log p + entropy))

    A row whose gradients are both 0 becomes 0, whatever it contains.

    Args:
        stats: [n, 4] statistics of the whole rows.
        grad_logprob: [n] float32.
        grad_entropy: [n] float32, or None for 0.
        others: "zero" sets rows that are not listed and padding columns to 0; "leave" keeps them.
        out: Memory for the gradient in place of the logits, which are then unchanged; of their shape, in any supported
            dtype.
    """
    with launch.named("row_gradient_"):
        out = logits if out is None else out
        _write_gradient(logits, ids, rows, columns, inv_temperature, stats, grad_logprob, grad_entropy, others, out)


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
    """Loss of every row and, in place, its gradient; for options that are not `per_sequence`, unsharded.

    Args:
        tokens: [n] vectors, float32. A row of weight 0 is not read, and gets outputs and a gradient of 0; a row masked
            by the correction gets a loss and a gradient of 0.
        options: The loss.
        with_gradient: False leaves the logits unchanged.
        out, others: As in `row_gradient_`.
        grad_scale: Factor of the gradient only.

    Returns:
        [n, 7] float32, the columns of `RowLosses`.
    """
    with launch.named("grpo_rows_"):
        row_arguments = (logits, ids, rows, columns, inv_temperature)
        stats = _stats(*row_arguments)
        logprob, entropy = logprob_and_entropy(stats, inv_temperature)
        losses = token_losses(logprob, entropy, tokens, options)
        if with_gradient:
            _write_gradient(
                *row_arguments, stats, *losses.gradients(grad_scale), others, logits if out is None else out
            )
        # Rows of weight 0 may hold anything, and are computed with the others; here their results are removed.
        return losses.outputs(logprob, entropy).masked_fill_((tokens.weight == 0)[:, None], 0.0)


def _stats(logits: Tensor, ids: Tensor, rows: Tensor | None, columns: int, inv_temperature: float) -> Tensor:
    stats = torch.empty(len(ids), 4, dtype=torch.float32, device=logits.device)
    for piece in _pieces(len(ids), columns, logits.device):
        x = _read(logits, rows, piece, columns)
        _piece_stats(x, ids[piece], inv_temperature, stats[piece])
    return stats


def _write_gradient(
    logits: Tensor,
    ids: Tensor,
    rows: Tensor | None,
    columns: int,
    inv_temperature: float,
    stats: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    others: str,
    out: Tensor,
) -> None:
    for piece in _pieces(len(ids), columns, logits.device):
        x = _read(logits, rows, piece, columns)
        # Where it can, a piece computes its gradient where it is stored, which may be the memory of the logits: all
        # steps are elementwise.
        into = out[piece, :columns] if rows is None and out.dtype == torch.float32 else None
        by_entropy = None if grad_entropy is None else grad_entropy[piece]
        grad = _piece_gradient(x, ids[piece], inv_temperature, stats[piece], grad_logprob[piece], by_entropy, into)
        if into is None:
            _write(out, rows, piece, columns, grad)
    if others == "zero":
        _zero_others(out, rows, columns)


def _pieces(rows: int, columns: int, device: torch.device) -> Iterator[slice]:
    """Slices of the rows: 512 KiB of float32 on a CPU, which fit its cache; else 256 MiB."""
    step = max(1, (2**17 if device.type == "cpu" else 2**26) // max(columns, 1))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _read(logits: Tensor, rows: Tensor | None, piece: slice, columns: int) -> Tensor:
    real = logits[:, :columns]
    return real[piece] if rows is None else real.index_select(0, rows[piece])


def _write(out: Tensor, rows: Tensor | None, piece: slice, columns: int, values: Tensor) -> None:
    real = out[:, :columns]
    if rows is None:
        real[piece].copy_(values)
    else:
        real.index_copy_(0, rows[piece], values.to(out.dtype))


def _zero_others(out: Tensor, rows: Tensor | None, columns: int) -> None:
    out[:, columns:].zero_()
    if rows is not None:
        unlisted = torch.ones(len(out), dtype=torch.bool, device=out.device).index_fill_(0, rows, False)
        out.index_fill_(0, unlisted.nonzero()[:, 0], 0.0)


def _piece_stats(x: Tensor, ids: Tensor, inv_temperature: float, out: Tensor) -> None:
    """Writes (m, s, w, t) of x [r, columns] into `out` [r, 4]."""
    # A shard that contains only padding; `amax` refuses an empty row.
    if x.shape[1] == 0:
        out.copy_(torch.tensor([-torch.inf, 0.0, 0.0, -torch.inf]))
        return
    m = x.amax(-1).float()
    d = _scaled_difference(x, m, inv_temperature)
    e = d.exp()
    out[:, 0] = m
    torch.sum(e, -1, out=out[:, 1])
    torch.sum(d.mul_(e), -1, out=out[:, 2])
    here, column = _local(ids, x.shape[1])
    out[:, 3] = torch.where(here, x.gather(1, column[:, None])[:, 0].float(), -torch.inf)


def _piece_gradient(
    x: Tensor,
    ids: Tensor,
    inv_temperature: float,
    stats: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    into: Tensor | None,
) -> Tensor:
    """[r, columns] float32 gradient of x, computed in `into` if given; `row_gradient_` has the formula."""
    m, s, w, _ = stats.unbind(-1)
    d = _scaled_difference(x, m, inv_temperature, into)
    unread = grad_logprob == 0
    if grad_entropy is None:
        grad = d.exp_().mul_((grad_logprob * -inv_temperature / s)[:, None])
    else:
        # log p + entropy = (d - log s) + (log s - w / s) = d - w / s
        e = d.exp()
        factor = d.sub_((w / s)[:, None]).mul_(grad_entropy[:, None]).add_(grad_logprob[:, None])
        grad = factor.mul_(e).mul_((-inv_temperature / s)[:, None])
        unread &= grad_entropy == 0
    if x.shape[1]:
        here, column = _local(ids, x.shape[1])
        grad.scatter_add_(1, column[:, None], torch.where(here, grad_logprob * inv_temperature, 0.0)[:, None])
    # Such a row may hold NaN, and 0 * NaN is NaN.
    for_nothing = unread.nonzero()[:, 0]
    return grad.index_fill_(0, for_nothing, 0.0) if len(for_nothing) else grad


def _scaled_difference(x: Tensor, m: Tensor, inv_temperature: float, into: Tensor | None = None) -> Tensor:
    """(x - m) * inv_temperature in float32, at least FLOOR; a row of only -inf gets FLOOR, not NaN."""
    d = torch.sub(x.float(), m.clamp(min=LOWEST)[:, None], out=into)
    if inv_temperature != 1.0:
        d.mul_(inv_temperature)
    return d.clamp_(min=FLOOR)


def _local(ids: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Whether this shard has the target, and the target's column (any valid column if it does not)."""
    column = ids.clamp(0, columns - 1)
    return column == ids, column
