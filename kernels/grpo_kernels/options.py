"""Options of the GRPO loss. Numbers are run-time scalars of the kernels: changing one does not recompile them."""

from __future__ import annotations

import math
from dataclasses import dataclass

KINDS = ("ppo", "cispo", "sapo", "gspo", "gspo_token", "gmpo", "vespo")
SEQUENCE_KINDS = ("gspo", "gspo_token", "gmpo", "vespo")
KL_ESTIMATORS = ("k1", "k2", "k3")
CORRECTIONS = ("none", "truncate", "mask")


@dataclass(frozen=True)
class LossOptions:
    """The loss of a token; `token_loss.py` has the formulas.

    Attributes:
        kind: "ppo", clipped importance ratio of the token (arXiv 1707.06347, equation 7); "cispo", the clipped ratio is
            a constant factor of the log-prob (arXiv 2506.13585, equations 4 and 5); "sapo", a sigmoid of the ratio in
            place of the clip (arXiv 2511.20347, section 3); "gspo", clipped ratio of the token's sequence (arXiv
            2507.18071, equations 5 to 7); "gspo_token", gspo's value, with gradients that let each token have its own
            advantage (section 4.3, equations 13 and 14); "gmpo", geometric mean of a sequence's clipped ratios (arXiv
            2507.20673); "vespo", a function of the sequence's ratio, the product of its tokens', is a constant factor
            of the log-prob (arXiv 2602.10693).
        clip_low: The ratio is clipped from below at 1 - clip_low; no bound from clip_low = 1 on, as ratios are
            positive.
        clip_high: The ratio is clipped from above at 1 + clip_high; inf for no bound.
        dual_clip: Upper bound c > 1 on loss / -A where the advantage A is negative (arXiv 1912.09729), or None. For
            ppo, gspo and gspo_token.
        tau_pos, tau_neg: Temperatures of SAPO's sigmoid, for positive advantages and for the others; the larger, the
            faster a token's gradient falls as its ratio moves away from 1.
        vespo_k_pos, vespo_lambda_pos: k and lambda of VESPO's factor rho^k exp(lambda (1 - rho)) for non-negative
            advantages: it is 1 at rho = 1 and largest at k / lambda; the larger both are, the faster it falls.
        vespo_k_neg, vespo_lambda_neg: k and lambda of VESPO's factor for negative advantages.
        off_policy_mask: The policy term of a token with negative advantage is 0 in a sequence whose mean log-prob has
            fallen by more than this since sampling, in nats (DeepSeek-V3.2, arXiv 2512.02556, section 3.1); None for no
            mask.
        kl: Estimator of the KL divergence to the reference policy: "k1", "k2" or "k3".
        kl_coef: Factor of the estimate in the loss, not negative; with 0 the reference is not needed.
        kl_unbiased: Multiplies the estimate by the token's importance ratio, with gradient, which makes the gradient
            that of the divergence for any sampling policy (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
        entropy_coef: Coefficient of the entropy bonus, subtracted from the loss.
        correction: Correction for the mismatch of engine and trainer, with c = exp(old - rollout) of a token: "none";
            "truncate", the policy term is multiplied by c, or by the bound that c exceeds, truncated importance
            sampling (IMPALA, arXiv 1802.01561; between engine and trainer: Yao et al., Your Efficient RL Framework
            Secretly Brings You Off-Policy RL Training, 2025); "mask", it is multiplied by c, and a token whose c is
            beyond a bound is ignored (IcePop, arXiv 2510.18855).
        correction_floor: Lower bound of c; at most 1, the value when engine and trainer agree; 0 for no bound.
        correction_cap: Upper bound of c; at least 1.

    Raises:
        ValueError: A field is out of range; names the field.
    """

    kind: str = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    off_policy_mask: float | None = None
    kl: str = "k3"
    kl_coef: float = 0.0
    kl_unbiased: bool = False
    entropy_coef: float = 0.0
    correction: str = "none"
    correction_floor: float = 0.0
    correction_cap: float = 2.0

    def __post_init__(self) -> None:
        _require_one_of("kind", self.kind, KINDS)
        _require_one_of("kl", self.kl, KL_ESTIMATORS)
        _require_one_of("correction", self.correction, CORRECTIONS)
        _require(self.clip_low >= 0, "clip_low", self.clip_low, "use a number that is not negative, 1 for no bound")
        _require(
            self.clip_high >= 0, "clip_high", self.clip_high, "use a number that is not negative, inf for no bound"
        )
        _require(0 <= self.kl_coef < math.inf, "kl_coef", self.kl_coef, "use a finite number that is not negative")
        _require(math.isfinite(self.entropy_coef), "entropy_coef", self.entropy_coef, "use a finite number")
        _require(
            1 <= self.correction_cap < math.inf,
            "correction_cap",
            self.correction_cap,
            "use a finite number, 1 or more: below, tokens about which engine and trainer agree would be cut as well",
        )
        _require(0 <= self.correction_floor <= 1, "correction_floor", self.correction_floor, "use a number from 0 to 1")
        for name in ("tau_pos", "tau_neg", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"):
            _require(0 < getattr(self, name) < math.inf, name, getattr(self, name), "use a finite number above 0")
        if self.off_policy_mask is not None:
            _require(
                0 <= self.off_policy_mask < math.inf,
                "off_policy_mask",
                self.off_policy_mask,
                "use a finite number that is not negative, or None",
            )
        if self.dual_clip is not None:
            _require(1 < self.dual_clip < math.inf, "dual_clip", self.dual_clip, "use a number above 1, or None")
            _require(
                self.kind not in ("cispo", "sapo", "gmpo", "vespo"),
                "dual_clip",
                self.dual_clip,
                f"{self.kind} has none, use None",
            )

    @property
    def per_sequence(self) -> bool:
        """Whether the loss of a token depends on other tokens of its sequence."""
        return self.kind in SEQUENCE_KINDS or self.off_policy_mask is not None

    @property
    def log_bounds(self) -> tuple[float, float, float]:
        """Bounds of the log-ratio: low, high and, for negative advantages, dual; infinite for none."""
        low = math.log1p(-self.clip_low) if self.clip_low < 1 else -math.inf
        dual = math.inf if self.dual_clip is None else math.log(self.dual_clip)
        return low, math.log1p(self.clip_high), dual


def _require_one_of(field: str, value: str, known: tuple[str, ...]) -> None:
    _require(value in known, field, repr(value), f"use one of {', '.join(known)}")


def _require(fine: bool, field: str, value: object, remedy: str) -> None:
    if not fine:
        raise ValueError(f"{field} is {value}; {remedy}")
