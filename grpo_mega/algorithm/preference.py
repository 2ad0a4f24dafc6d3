"""Preference learning from pairs of responses: loss and metrics of a reward model.

Bradley and Terry (1952): the response with the score r_chosen is preferred to the one with r_rejected with probability
sigmoid(r_chosen - r_rejected). Ouyang et al. (2022, arXiv 2203.02155), equation 1, has the negative log-likelihood. All
functions take the scores of P pairs, in float64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

BINS = 10
"""Number of bins of the confidence, for the calibration error."""


def preference_loss(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """[P], [P] scores -> mean of -log sigmoid(r_chosen - r_rejected) (equation 1 of Ouyang et al.), a scalar."""
    return -F.logsigmoid(chosen - rejected).mean()


def preference_slopes(chosen: torch.Tensor, rejected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[P], [P] scores -> [P], [P] derivatives of `preference_loss` by each score.

    -+(1 - sigmoid(difference)) / P. With them as coefficients the sum of coefficient * score has the gradient of the
    loss in the model's parameters, although no term involves the other response of its pair: the two may be computed in
    different micro-batches, and on different data parallel replicas.
    """
    # 1 - sigmoid(x) is computed as sigmoid(-x), which does not cancel for large x.
    slope = torch.sigmoid(rejected - chosen) / max(1, len(chosen))
    return -slope, slope


def preference_metrics(chosen: torch.Tensor, rejected: torch.Tensor) -> dict[str, float]:
    """[P], [P] scores of one pair or more -> loss; accuracy, the share of pairs whose chosen response has the higher
    score; margin, the mean difference."""
    difference = chosen - rejected
    return {
        "loss": preference_loss(chosen, rejected).item(),
        "accuracy": (difference > 0).double().mean().item(),
        "margin": difference.mean().item(),
    }


def calibration_error(chosen: torch.Tensor, rejected: torch.Tensor, bins: int = BINS) -> float:
    """The expected calibration error (Guo et al., 2017, arXiv 1706.04599, equation 3) of one pair or more.

    The confidence in a pair is the probability of the response that the model prefers, sigmoid(|difference|), from 1/2
    to 1, divided into `bins` of equal width. The error is the mean over pairs of the distance between the mean
    confidence of a pair's bin and the share of its pairs for which the model prefers the chosen response.
    """
    difference = chosen - rejected
    confidence, right = torch.sigmoid(difference.abs()), (difference > 0).double()
    # A confidence of exactly 1 belongs to the last bin, not to one after it.
    number = ((2 * confidence - 1) * bins).long().clamp(max=bins - 1)
    # The sum over a bin is its number of pairs times the distance of its means, so an empty bin adds 0.
    off = [(confidence - right)[number == k].sum().abs() for k in range(bins)]
    return (torch.stack(off).sum() / len(difference)).item()
