"""The loss of an update, from the configuration."""

from __future__ import annotations

from grpo_kernels import GRPOLoss
from grpo_mega.algorithm.objective import Loss, grpo_loss
from grpo_mega.config.schema import AlgorithmConfig
from grpo_mega.stages.corrections import correction_of


def loss_of(algorithm: AlgorithmConfig, on_policy: bool) -> Loss:
    """The GRPO loss with these settings; with `on_policy` the old policy is the current one, see `grpo_loss`."""
    options = GRPOLoss(
        kind=algorithm.objective,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        tau_pos=algorithm.tau_pos,
        tau_neg=algorithm.tau_neg,
        vespo_k_pos=algorithm.vespo_k_pos,
        vespo_lambda_pos=algorithm.vespo_lambda_pos,
        vespo_k_neg=algorithm.vespo_k_neg,
        vespo_lambda_neg=algorithm.vespo_lambda_neg,
        off_policy_mask=algorithm.off_policy_mask,
        kl=algorithm.kl_estimator,
        kl_coef=algorithm.kl_coef if algorithm.kl_in == "loss" else 0.0,
        kl_unbiased=algorithm.kl_unbiased,
        entropy_coef=algorithm.entropy_coef,
        correction=algorithm.correction if correction_of(algorithm) is None else "none",
        correction_floor=algorithm.correction_floor,
        correction_cap=algorithm.correction_cap,
    )
    return grpo_loss(options, on_policy, measures_kl=algorithm.kl_coef > 0)
