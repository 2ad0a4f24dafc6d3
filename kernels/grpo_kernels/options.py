"""What the GRPO loss is made of. Every number is a run-time scalar of the kernels: changing one compiles nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

KINDS = ("ppo", "gspo", "cispo")
KL_ESTIMATORS = ("k1", "k2", "k3")
CORRECTIONS = ("none", "truncate", "mask")


@dataclass(frozen=True)
class GRPOLoss:
    """The loss of a token; `token_loss.py` has the formulas.

    Attributes:
        kind: "ppo", clipped importance ratio of the token (arXiv 1707.06347, equation 7); "gspo", of its sequence
            (arXiv 2507.18071, equations 5 to 7); "cispo", the clipped ratio is a constant factor of the log-prob
            (arXiv 2506.13585, equations 4 and 5).
        clip_low: The ratio is clipped from below at 1 - clip_low; from 1 on at 0, which no ratio is below.
        clip_high: The ratio is clipped from above at 1 + clip_high; inf for no bound.
        dual_clip: Upper bound c > 1 on loss / -A where the advantage A is negative (arXiv 1912.09729), or None. Not for
            cispo, which has no such loss.
        kl: Estimator of the KL divergence to the reference policy: "k1", "k2" or "k3".
        kl_coef: Factor of the estimate in the loss, not negative; with 0 the reference is not needed.
        entropy_coef: The loss falls by this times the entropy.
        correction: What to do when the engine that sampled and the trainer disagree about a token, with
            c = exp(old - rollout): "none"; "truncate", the policy term is multiplied by min(c, correction_cap),
            truncated importance sampling (IMPALA, arXiv 1802.01561; between engine and trainer: Yao et al., Your
            Efficient RL Framework Secretly Brings You Off-Policy RL Training, 2025); "mask", it is multiplied by c, and
            a token whose c is above the cap does not count at all (IcePop, arXiv 2510.18855, without its lower bound).
        correction_cap: See `correction`; at least 1, the c of a token about which they agree.

    Raises:
        ValueError: A field is out of range; names the field.
    """

    kind: str = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl: str = "k3"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    correction: str = "none"
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
        if self.dual_clip is not None:
            _require(1 < self.dual_clip < math.inf, "dual_clip", self.dual_clip, "use a number above 1, or None")
            _require(self.kind != "cispo", "dual_clip", self.dual_clip, "cispo has no dual clip, use None")

    @property
    def log_bounds(self) -> tuple[float, float, float]:
        """The bounds of the ratio's logarithm: low, high and, for negative advantages, dual; infinite for none."""
        low = math.log1p(-self.clip_low) if self.clip_low < 1 else -math.inf
        dual = math.inf if self.dual_clip is None else math.log(self.dual_clip)
        return low, math.log1p(self.clip_high), dual


def _require_one_of(field: str, value: str, known: tuple[str, ...]) -> None:
    _require(value in known, field, repr(value), f"use one of {', '.join(known)}")


def _require(fine: bool, field: str, value: object, remedy: str) -> None:
    if not fine:
        raise ValueError(f"{field} is {value}; {remedy}")
