"""Scores of the steps of a completion: loss and metrics of a process reward model, and the score of the whole.

A step with the score s is correct with probability sigmoid(s). Lightman et al. (2023, Let's Verify Step by Step, arXiv
2305.20050, section 2.4 and appendix F) and Math-Shepherd (Wang et al., 2023, arXiv 2312.08935, equation 2) learn it by
the cross-entropy with the label of the step, read at its last token. Losses and metrics take S steps, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

BINS = 10
"""Number of bins of the probability, for the calibration error."""


def step_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[S] scores, [S] labels y in [0, 1] -> mean of -y log sigmoid(s) - (1 - y) log sigmoid(-s), a scalar."""
    return F.binary_cross_entropy_with_logits(scores, labels)


def step_metrics(scores: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """[S] scores, [S] labels of one or more steps -> metrics. A step counts as right from a label of one half on.

    loss; accuracy, the share of steps for which probability and label are on the same side of one half; right, the
    share of right steps, the accuracy of a trivial model; auc, the probability that a right step has a higher score
    than a wrong one, a tie counting half (missing where all steps are of one kind); calibration_error.
    """
    right = labels >= 0.5
    metrics = {
        "loss": step_loss(scores, labels).item(),
        "accuracy": ((scores >= 0) == right).double().mean().item(),
        "right": right.double().mean().item(),
        "calibration_error": step_calibration_error(scores, labels),
    }
    if right.any() and not right.all():
        metrics["auc"] = _area_under_curve(scores, right)
    return metrics


def _area_under_curve(scores: torch.Tensor, right: torch.Tensor) -> float:
    """Area under the ROC curve, from ranks, with ties sharing theirs (Mann and Whitney, 1947)."""
    _, place, count = torch.unique(scores, sorted=True, return_inverse=True, return_counts=True)
    last = count.cumsum(0).double()
    # Ranks begin at 1; equal scores get the mean of the ranks that they occupy together.
    rank = (last - (count - 1) / 2)[place]
    rights, wrongs = int(right.sum()), int((~right).sum())
    # The ranks of the right steps, less the least that their sum can be, count the pairs in which a right step wins.
    return ((rank[right].sum() - rights * (rights + 1) / 2) / (rights * wrongs)).item()


def step_calibration_error(scores: torch.Tensor, labels: torch.Tensor, bins: int = BINS) -> float:
    """The expected calibration error (Guo et al., 2017, arXiv 1706.04599, equation 3) of one step or more.

    The mean over steps of the distance between the mean probability of a step's bin, of `bins` of equal width from 0 to
    1, and the mean label of its steps.
    """
    probability = torch.sigmoid(scores)
    # A probability of exactly 1 belongs to the last bin, not to one after it.
    number = (probability * bins).long().clamp(max=bins - 1)
    off = [(probability - labels)[number == k].sum().abs() for k in range(bins)]
    return (torch.stack(off).sum() / len(scores)).item()


def outcome_of_steps(probabilities: Sequence[float], how: str) -> float:
    """Score of a completion from the probabilities of its steps, one or more: their min, product or last."""
    if how == "product":
        return math.prod(probabilities)
    return min(probabilities) if how == "min" else probabilities[-1]
