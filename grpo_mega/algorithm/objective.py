"""Objective of an update: a loss of the scored tokens of one micro-batch, with metrics to log.

The formulas themselves (ratio, clip, KL, entropy, correction) are in `grpo_kernels/token_loss.py`. Each token's loss is
multiplied by its weight in the whole batch (`weights.py`), so the sum over micro-batches is the objective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from grpo_kernels import LossOptions, linear_grpo_loss, linear_token_loss
from grpo_mega.types import ScoredTokens

TokenLoss = Callable[[torch.Tensor, ScoredTokens], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""(log-probs [n], scored tokens) -> (loss of each token [n], per-token metrics {name: [n]}).

The metrics "loss", "logprob" and "entropy" are added to these."""


@dataclass
class LossResult:
    """Losses of the n scored tokens of a micro-batch.

    Attributes:
        total: The scalar sum(weight * token loss), which has gradients.
        losses: [n] the terms of `total`.
        logprob: [n] log-probs.
        means: Metrics to log, see `logged_mean`: float64 [2].
        entropies: [n] entropies; None where the loss does not know them.
    """

    total: torch.Tensor
    losses: torch.Tensor
    logprob: torch.Tensor
    means: dict[str, torch.Tensor]
    entropies: torch.Tensor | None = None


class Loss(Protocol):
    """A loss of hidden states [n, H], an output layer [V, H] and the tokens to predict."""

    def __call__(
        self,
        hidden: torch.Tensor,
        output_weight: torch.Tensor,
        scored: ScoredTokens,
        sequence_group: dist.ProcessGroup | None = None,
        **settings: Any,
    ) -> LossResult:
        """Computes the loss and the metrics to log.

        Args:
            hidden: [n, H] states that predict the scored tokens.
            output_weight: [V, H] matrix of the output layer, or this rank's part of the vocabulary.
            scored: The n tokens.
            sequence_group: Group of the ranks that each hold some tokens of every sequence (context parallelism); None
                when this rank holds whole sequences.
            settings: See `grpo_kernels.linear`.
        """
        ...


def grpo_loss(options: LossOptions, old_is_current: bool, measures_kl: bool = False) -> Loss:
    """The GRPO loss (DeepSeekMath, arXiv 2402.03300, equation 3) and its variants, see `grpo_kernels.LossOptions`.

    With `old_is_current` the ratio is 1, and `scored.old_logprob` is not read. With `measures_kl` the KL
    divergence from the reference is logged although it is not in the loss."""
    has_reference = measures_kl or options.kl_coef > 0

    def loss(
        hidden: torch.Tensor,
        output_weight: torch.Tensor,
        scored: ScoredTokens,
        sequence_group: dist.ProcessGroup | None = None,
        **settings: Any,
    ) -> LossResult:
        if options.per_sequence:
            settings |= {"cu_seqlens": scored.cu_seqlens, "sequence_group": sequence_group}
        advantage, weight = scored.advantage, scored.weight
        if scored.correction is not None:
            # The mask measures whole sequences, including tokens that the correction leaves out.
            if options.off_policy_mask is not None:
                settings |= {"sampled": weight != 0}
            advantage, weight = advantage * scored.correction, weight.masked_fill(scored.correction == 0, 0.0)
        total, result = linear_grpo_loss(
            hidden,
            output_weight,
            scored.tokens,
            None if old_is_current else scored.old_logprob,
            scored.ref_logprob if has_reference else None,
            advantage,
            weight,
            options=options,
            rollout_logprob=scored.rollout_logprob,
            **settings,
        )
        clipped = [result.clip_low, result.clip_high, result.clip_dual]
        if options.kind == "cispo" and options.clip_low == options.clip_high == 0:
            clipped = [torch.zeros_like(share) for share in clipped]  # the ratio is 1; only rounding is beyond it
        logged = {
            "ratio": result.ratio,
            "clip_fraction": sum(clipped),
            "clip_low": clipped[0],
            "clip_high": clipped[1],
            "approx_kl_old": result.kl_old,
            "entropy": result.entropy,
        }
        if has_reference:
            logged["kl"] = result.kl
        means = {name: logged_mean(value * result.tokens, result.tokens) for name, value in logged.items()}
        if scored.correction is not None:
            count = torch.ones_like(scored.correction).sum()
            means["correction"] = logged_mean(scored.correction.double().sum(), count)
            means["rejected"] = logged_mean((scored.correction == 0).sum(), count)
        if options.correction != "none":
            old = result.logprob if old_is_current else scored.old_logprob
            ratio = (old - scored.rollout_logprob).exp()
            beyond = (ratio < options.correction_floor) | (ratio > options.correction_cap)
            means["corrected"] = logged_mean(beyond.sum(), torch.ones_like(beyond).sum())
        return LossResult(total, result.loss, result.logprob, means, result.entropies)

    return loss


def token_wise(token_loss: TokenLoss) -> Loss:
    """Creates a `Loss` from a per-token loss of log-probs: multiplies it by token weights, and averages its metrics."""

    def loss(
        hidden: torch.Tensor,
        output_weight: torch.Tensor,
        scored: ScoredTokens,
        sequence_group: dist.ProcessGroup | None = None,
        **settings: Any,
    ) -> LossResult:
        def weighted(logprob: torch.Tensor, entropy: torch.Tensor, part: slice) -> tuple[torch.Tensor, dict]:
            tokens = scored.part(part)
            losses, metrics = token_loss(logprob, tokens)
            losses = tokens.weight * losses
            return losses, {**metrics, "loss": losses, "logprob": logprob, "entropy": entropy}

        total, result = linear_token_loss(hidden, output_weight, scored.tokens, weighted, **settings)
        # What is left after these two are per-token metrics, to be averaged.
        losses, logprob = result.pop("loss"), result.pop("logprob")
        means = {name: logged_mean(x.double().sum(), torch.ones_like(x).sum()) for name, x in result.items()}
        return LossResult(total, losses, logprob, means, result["entropy"])

    return loss


negative_log_likelihood = token_wise(lambda logprob, _: (-logprob, {}))
"""Loss of language modelling and supervised fine-tuning."""


def logged_mean(total: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """float64 [2]: a sum, and the number of tokens to average it over when it is logged; such pairs can be added."""
    return torch.stack([total.double(), tokens.double()])


def logged_sum(total: torch.Tensor) -> torch.Tensor:
    """float64 [2]: a sum to be logged without averaging, in the format of `logged_mean` with 0 tokens."""
    return logged_mean(total, torch.zeros_like(total))
