"""Arguments of a launch: the rows to visit, the loss as plain numbers, and its name in a profile."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import record_function

from grpo_kernels.options import CORRECTIONS, KINDS, KL_ESTIMATORS, LossOptions

EVERY_ROW, LISTED_ROWS, WHERE_LISTED = 0, 1, 2


def named(operation: str) -> record_function:
    """Context for one launch, or its equivalent on a CPU, named `grpo_kernels::OPERATION` in torch's profiler."""
    return record_function(f"grpo_kernels::{operation}")


@dataclass(frozen=True)
class Visit:
    """Rows that a launch visits, the i-th of `count`, and the token (index into ids, weights, ...) of each.

    Attributes:
        mode: EVERY_ROW: row i, token i. LISTED_ROWS: row index[i], token i. WHERE_LISTED: row i, token index[i], which
            is -1 for a row that is not listed and must become 0.
        index: int64; any tensor of that type if the mode does not read it.
        count: Number of rows to go through.
        width: Number of leading columns to write.
    """

    mode: int
    index: Tensor
    count: int
    width: int


def visit(out: Tensor, ids: Tensor, rows: Tensor | None, columns: int, others: str) -> Visit:
    """Rows and columns of `out` that a launch must write; `others` as in `rows.row_gradient_`."""
    width = out.shape[1] if others == "zero" else columns
    if rows is None:
        return Visit(EVERY_ROW, ids, len(out), width)
    if others == "leave":
        return Visit(LISTED_ROWS, rows, len(rows), width)
    # Rows that are not listed must be visited as well, to be set to 0.
    token_of_row = torch.full((len(out),), -1, dtype=torch.int64, device=out.device)
    token_of_row[rows] = torch.arange(len(rows), device=out.device)
    return Visit(WHERE_LISTED, token_of_row, len(out), width)


@dataclass(frozen=True)
class Scalars:
    """Options of the loss as run-time arguments of a kernel, in this order; bounds are on the log-ratio."""

    log_low: float
    log_high: float
    log_dual: float
    tau_pos: float
    tau_neg: float
    kl_coef: float
    entropy_coef: float
    correction_floor: float
    correction_cap: float
    kind: int
    kl: int
    kl_unbiased: int
    correction: int


def scalars(options: LossOptions) -> Scalars:
    """The options as numbers, for losses that are not `per_sequence`.

    `kind` is 0 (ppo), 1 (cispo) or 2 (sapo), `kl` 1, 2 or 3, `correction` 0 (none), 1 (truncate) or 2 (mask).
    """
    log_low, log_high, log_dual = options.log_bounds
    return Scalars(
        log_low=log_low,
        log_high=log_high,
        log_dual=log_dual,
        tau_pos=float(options.tau_pos),
        tau_neg=float(options.tau_neg),
        kl_coef=float(options.kl_coef),
        entropy_coef=float(options.entropy_coef),
        correction_floor=float(options.correction_floor),
        correction_cap=float(options.correction_cap),
        kind=KINDS.index(options.kind),
        kl=1 + KL_ESTIMATORS.index(options.kl),
        kl_unbiased=int(options.kl_unbiased),
        correction=CORRECTIONS.index(options.correction),
    )
