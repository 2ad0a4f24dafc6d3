"""What the Triton and the CUDA kernels are told about a launch: which rows to visit, and the loss as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kernels.options import KL_ESTIMATORS, GRPOLoss

EVERY_ROW, LISTED_ROWS, WHERE_LISTED = 0, 1, 2


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
    kl: int
    cispo: int


def scalars(options: GRPOLoss) -> Scalars:
    """The numbers behind the options, for "ppo" and "cispo"; `kl` is 1, 2 or 3."""
    log_low, log_high, log_dual = options.log_bounds
    return Scalars(
        log_low=log_low,
        log_high=log_high,
        log_dual=log_dual,
        kl_coef=float(options.kl_coef),
        entropy_coef=float(options.entropy_coef),
        kl=1 + KL_ESTIMATORS.index(options.kl),
        cispo=int(options.kind == "cispo"),
    )
