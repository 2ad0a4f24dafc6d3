"""What a launch is told: which rows to visit, the loss as plain numbers; and the name it has in a profile."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import record_function

from grpo_kernels.options import CORRECTIONS, KL_ESTIMATORS, GRPOLoss

EVERY_ROW, LISTED_ROWS, WHERE_LISTED = 0, 1, 2


def named(operation: str) -> record_function:
    """Around one launch, or what stands for it on a CPU: `grpo_kernels::OPERATION` in torch's profiler."""
    return record_function(f"grpo_kernels::{operation}")


@dataclass(frozen=True)
class Visit:
    """Which rows a launch goes through, the i-th of `count`, and which token (place in ids, weights, ...) each is.

    Attributes:
        mode: EVERY_ROW: row i, token i. LISTED_ROWS: row index[i], token i. WHERE_LISTED: row i, token index[i], which
            is -1 for a row that is not listed and has to become 0.
        index: int64; anything of that type where the mode does not read it.
        count: Number of rows to go through.
        width: Number of leading columns to write.
    """

    mode: int
    index: Tensor
    count: int
    width: int


def visit(out: Tensor, ids: Tensor, rows: Tensor | None, columns: int, others: str) -> Visit:
    """The rows and columns of `out` that a launch has to write; `others` as for `rows.row_gradient_`."""
    width = out.shape[1] if others == "zero" else columns
    if rows is None:
        return Visit(EVERY_ROW, ids, len(out), width)
    if others == "leave":
        return Visit(LISTED_ROWS, rows, len(rows), width)
    token_of_row = torch.full((len(out),), -1, dtype=torch.int64, device=out.device)
    token_of_row[rows] = torch.arange(len(rows), device=out.device)
    return Visit(WHERE_LISTED, token_of_row, len(out), width)


@dataclass(frozen=True)
class Scalars:
    """The options of the loss as run-time arguments of a kernel, in this order; bounds are those of the log-ratio."""

    log_low: float
    log_high: float
    log_dual: float
    kl_coef: float
    entropy_coef: float
    correction_cap: float
    kl: int
    cispo: int
    correction: int


def scalars(options: GRPOLoss) -> Scalars:
    """The numbers behind the options, for "ppo" and "cispo".

    `kl` is 1, 2 or 3, `correction` 0 (none), 1 (truncate) or 2 (mask).
    """
    log_low, log_high, log_dual = options.log_bounds
    return Scalars(
        log_low=log_low,
        log_high=log_high,
        log_dual=log_dual,
        kl_coef=float(options.kl_coef),
        entropy_coef=float(options.entropy_coef),
        correction_cap=float(options.correction_cap),
        kl=1 + KL_ESTIMATORS.index(options.kl),
        cispo=int(options.kind == "cispo"),
        correction=CORRECTIONS.index(options.correction),
    )
