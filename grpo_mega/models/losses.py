"""What an update minimises: a loss of the scored tokens of one micro-batch, with what to log about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core import parallel_state

from grpo_kernels import GRPOLoss, linear_grpo_loss, linear_token_loss
from grpo_mega.config.schema import AlgorithmConfig
from grpo_mega.models.microbatch import ScoredTokens

TokenLoss = Callable[[torch.Tensor, ScoredTokens], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""(log-probs [n], what is known about the tokens) -> (loss of each token [n], per-token metrics {name: [n]}).

"loss", "logprob" and "entropy" are there without them."""


@dataclass
class LossFound:
    """Of the n scored tokens of a micro-batch.

    Attributes:
        total: The scalar sum(weight * token loss), which has gradients.
        losses: [n] its terms.
        logprob: [n] log-probs.
        means: What is logged, each a sum and the number of tokens that it is over: float64 [2].
    """

    total: torch.Tensor
    losses: torch.Tensor
    logprob: torch.Tensor
    means: dict[str, torch.Tensor]


class Loss(Protocol):
    """A loss of hidden states [n, H], an output layer and the tokens they predict."""

    def __call__(
        self, hidden: torch.Tensor, output_weight: torch.Tensor, scored: ScoredTokens, **settings: Any
    ) -> LossFound:
        """The loss and what to log; `settings`: see `grpo_kernels.linear`."""
        ...


def grpo_loss(config: AlgorithmConfig, on_policy: bool) -> Loss:
    """The GRPO loss; `on_policy`: the old policy is the policy itself, and `scored.old_logprob` is not read."""
    options = GRPOLoss(
        kind=config.objective,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        kl=config.kl_estimator,
        kl_coef=config.kl_coef,
        entropy_coef=config.entropy_coef,
        correction=config.correction,
        correction_cap=config.correction_cap,
    )

    def loss(hidden: torch.Tensor, output_weight: torch.Tensor, scored: ScoredTokens, **settings: Any) -> LossFound:
        if options.kind == "gspo":
            settings |= {"cu_seqlens": scored.cu_seqlens, "sequence_group": _context_parallel_group()}
        total, found = linear_grpo_loss(
            hidden,
            output_weight,
            scored.tokens,
            None if on_policy else scored.old_logprob,
            scored.ref_logprob if options.kl_coef else None,
            scored.advantage,
            scored.weight,
            options=options,
            rollout_logprob=scored.rollout_logprob,
            **settings,
        )
        logged = {
            "ratio": found.ratio,
            "clip_fraction": found.clip_low + found.clip_high + found.clip_dual,
            "clip_low": found.clip_low,
            "clip_high": found.clip_high,
            "approx_kl_old": found.kl_old,
            "entropy": found.entropy,
        }
        if options.kl_coef:
            logged["kl"] = found.kl
        means = {name: mean_over(value * found.tokens, found.tokens) for name, value in logged.items()}
        if options.correction != "none":
            old = found.logprob if on_policy else scored.old_logprob
            beyond = (old - scored.rollout_logprob).exp() > options.correction_cap
            means["corrected"] = mean_over(beyond.sum(), torch.ones_like(beyond).sum())
        return LossFound(total, found.loss, found.logprob, means)

    return loss


def token_wise(token_loss: TokenLoss) -> Loss:
    """Any loss of each token's log-prob; its weight is multiplied with it here, its metrics are averaged."""

    def loss(hidden: torch.Tensor, output_weight: torch.Tensor, scored: ScoredTokens, **settings: Any) -> LossFound:
        def weighted(logprob: torch.Tensor, entropy: torch.Tensor, part: slice) -> tuple[torch.Tensor, dict]:
            known = scored.part(part)
            losses, metrics = token_loss(logprob, known)
            losses = known.weight * losses
            return losses, {**metrics, "loss": losses, "logprob": logprob, "entropy": entropy}

        total, found = linear_token_loss(hidden, output_weight, scored.tokens, weighted, **settings)
        losses, logprob = found.pop("loss"), found.pop("logprob")
        means = {name: mean_over(x.double().sum(), torch.ones_like(x).sum()) for name, x in found.items()}
        return LossFound(total, losses, logprob, means)

    return loss


negative_log_likelihood = token_wise(lambda logprob, _: (-logprob, {}))
"""The loss of language modelling and supervised fine-tuning."""


def mean_over(total: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """A sum that is to be logged as a mean over so many tokens; such pairs add up."""
    return torch.stack([total.double(), tokens.double()])


def of_all(total: torch.Tensor) -> torch.Tensor:
    """A sum that is to be logged as it is: over no tokens."""
    return mean_over(total, torch.zeros_like(total))


def _context_parallel_group() -> Any:
    group = parallel_state.get_context_parallel_group()
    return group if group.size() > 1 else None
