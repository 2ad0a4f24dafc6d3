"""Corrections of whole sequences, and over the batch, for the difference between engine and trainer.

The engine samples with probabilities that differ slightly from the trainer's old policy. Importance sampling corrects
for it: c = old policy / engine multiplies the policy term. A correction of each token by itself is part of the loss
(`grpo_kernels.LossOptions`), without a further pass; corrections that depend on other tokens are computed here, before
the updates of a step, as one factor for each token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class CorrectionOptions:
    """Options of the correction by the importance ratio c.

    Attributes:
        kind: "none", the factor is 1; "truncate", it is c, or the bound that c exceeds (truncated importance sampling,
            arXiv 1802.01561); "mask", it is c, or 0 where c is beyond a bound (IcePop, arXiv 2510.18855).
        level: Level of the ratio c: "token"; "sequence", the product over its tokens; or "sequence_mean", the geometric
            mean over its tokens.
        floor: Lower bound of c; 0 for none.
        cap: Upper bound of c.
        rejection_floor: The factors of a sequence are 0 when the geometric mean of its ratios is below this; 0 for no
            bound.
        rejection_cap: The factors of a sequence are 0 when the geometric mean of its ratios is above this; inf for no
            bound.
        normalized: Divides the factors by the mean, over the batch, of the factors above 0: over tokens, or over
            sequences when c is a sequence's ratio.
    """

    kind: str = "none"
    level: str = "token"
    floor: float = 0.0
    cap: float = 2.0
    rejection_floor: float = 0.0
    rejection_cap: float = math.inf
    normalized: bool = False


def correction_factors(
    log_ratio: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    options: CorrectionOptions,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Factor of each token's policy term; a token whose factor is 0 has no loss at all.

    Sources of sequence ratios, truncated or masked: Liu et al., When Speed Kills Stability: Demystifying RL Collapse
    from the Training-Inference Mismatch, 2025.

    Args:
        log_ratio: [T] log-prob under the old policy minus log-prob under the engine.
        mask: [T] bool, trained tokens; others get a factor of 0 and are ignored.
        cu_seqlens: [N + 1] integers, start of every sequence, then T.
        options: Options of the correction.
        group: Group of ranks with other sequences of the batch, for CPU tensors; all must call this. None when all
            sequences are here.

    Returns:
        [T] float32. A NaN in `log_ratio` is a NaN in every factor that depends on it.
    """
    # Untrained tokens may hold NaN, which only `where` removes: a product with 0 would keep it. In float64, because the
    # log-ratios of a whole sequence are summed.
    log_ratio = torch.where(mask, log_ratio.double(), 0.0)
    tokens = _of_sequences(mask.double(), cu_seqlens)
    mean = _of_sequences(log_ratio, cu_seqlens) / tokens.clamp(min=1)
    of_token = torch.arange(len(tokens)).repeat_interleave(cu_seqlens.diff())
    # First the factors that the bounds of c leave; then whole sequences are rejected; then the mean over the batch
    # divides.
    factor = torch.where(mask, _bounded(_log_c(log_ratio, mask, cu_seqlens, options), options), 0.0)
    low, high = _log(options.rejection_floor), _log(options.rejection_cap)
    rejected = (mean < low) | (mean > high)
    # A NaN lies beyond no bound, so a rejection would let it pass: it is added to every factor that depends on it.
    factor = factor.masked_fill(rejected[of_token], 0.0) + torch.where(mean.isnan(), mean, 0.0)[of_token]
    if options.normalized:
        # A ratio of a sequence must count once, not once per token: the shares of its tokens sum to 1.
        share = torch.ones_like(factor) if options.level == "token" else 1 / tokens[of_token].clamp(min=1)
        # Divided by the weighted mean of the factors that are not 0, over all ranks.
        counted = share * (factor != 0)
        sums = torch.stack([(factor * counted).sum(), counted.sum()])
        if group is not None:
            dist.all_reduce(sums, group=group)
        factor = factor / torch.where(sums[1] > 0, sums[0] / sums[1], 1.0)
    # A product over many tokens may underflow to 0 in float32, but a factor of 0 means that the token is left out.
    smallest = torch.where(factor > 0, torch.finfo(torch.float32).tiny, factor)
    return torch.maximum(factor, smallest).float()


def share_beyond(
    log_ratio: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    options: CorrectionOptions,
    group: dist.ProcessGroup | None = None,
) -> float:
    """Share of trained tokens whose ratio c is beyond a bound; for the arguments see `correction_factors`.

    0 when no token is trained.
    """
    log_c = _log_c(torch.where(mask, log_ratio.double(), 0.0), mask, cu_seqlens, options)
    beyond = (log_c < _log(options.floor)) | (log_c > _log(options.cap))
    counts = torch.stack([(beyond & mask).sum(), mask.sum()])
    if group is not None:
        dist.all_reduce(counts, group=group)
    return float(counts[0] / counts[1].clamp(min=1))


def _log_c(log_ratio: Tensor, mask: Tensor, cu_seqlens: Tensor, options: CorrectionOptions) -> Tensor:
    """[T] log of c at its level, from [T] float64 log-ratios that are 0 where no token is trained."""
    if options.level == "token":
        return log_ratio
    total, tokens = (_of_sequences(x, cu_seqlens) for x in (log_ratio, mask.double()))
    of_sequence = total if options.level == "sequence" else total / tokens.clamp(min=1)
    return of_sequence.repeat_interleave(cu_seqlens.diff())


def _bounded(log_c: Tensor, options: CorrectionOptions) -> Tensor:
    """[T] ratios after truncation or mask."""
    low, high = _log(options.floor), _log(options.cap)
    if options.kind == "none":
        return torch.ones_like(log_c)
    if options.kind == "truncate":
        return log_c.clamp(low, high).exp()
    return log_c.exp().masked_fill((log_c < low) | (log_c > high), 0.0)


def _of_sequences(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N] sums over the tokens of each sequence."""
    return torch.segment_reduce(values, "sum", offsets=cu_seqlens, initial=0)


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf
