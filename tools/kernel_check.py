"""Compares the loss with float64 in every setting: values, log-probs and gradients, from logits and hidden states.

`bench_kernels.py --check` runs it on this project's kernels. Any other function that takes the same arguments can be
checked as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import grpo_kernels
from grpo_kernels import LossOptions, reference

COUNT, COLUMNS, HIDDEN, TEMPERATURE = 40, 515, 32, 0.8
# Limits of errors: of losses relative to the largest, of log-probs, and of gradients relative in L2 norm; the second is
# that of gradients which are rounded to bfloat16.
VALUES = 2e-5
ROUNDED = 5e-3

LOSSES: dict[str, LossOptions] = {
    "ppo": LossOptions(clip_low=0.2, clip_high=0.28),
    "ppo, no bound below": LossOptions(clip_low=1.0, clip_high=0.28),
    "ppo, no bound above": LossOptions(clip_low=0.2, clip_high=float("inf")),
    "ppo, dual clip": LossOptions(clip_low=0.2, clip_high=0.28, dual_clip=2.0),
    "ppo, k1": LossOptions(kl="k1", kl_coef=0.5),
    "ppo, k2": LossOptions(kl="k2", kl_coef=0.5),
    "ppo, k3": LossOptions(kl="k3", kl_coef=0.5),
    "ppo, entropy bonus": LossOptions(entropy_coef=0.3),
    "ppo, entropy penalty": LossOptions(entropy_coef=-0.3),
    "ppo, truncate": LossOptions(correction="truncate", correction_cap=1.5),
    "ppo, mask": LossOptions(correction="mask", correction_cap=1.5),
    "ppo, all of it": LossOptions(
        dual_clip=2.0, kl="k3", kl_coef=0.5, entropy_coef=0.3, correction="truncate", correction_cap=1.5
    ),
    "gspo": LossOptions(kind="gspo", clip_low=0.1, clip_high=0.1),
    "gspo, dual clip": LossOptions(kind="gspo", clip_low=0.1, clip_high=0.1, dual_clip=1.2),
    "gspo, all of it": LossOptions(
        kind="gspo", kl="k2", kl_coef=0.5, entropy_coef=0.3, correction="mask", correction_cap=1.5
    ),
    "gspo_token": LossOptions(kind="gspo_token", clip_low=0.1, clip_high=0.1),
    "gmpo": LossOptions(kind="gmpo", clip_low=0.33, clip_high=0.49, kl="k3", kl_coef=0.1),
    "vespo": LossOptions(kind="vespo", vespo_k_pos=0.5, vespo_lambda_pos=0.25, kl="k1", kl_coef=0.1),
    "ppo, off-policy mask": LossOptions(off_policy_mask=0.1),
    "ppo, unbiased k3": LossOptions(kl="k3", kl_coef=0.5, kl_unbiased=True),
    "ppo, mask on both sides": LossOptions(correction="mask", correction_floor=0.5, correction_cap=5.0),
    "sapo": LossOptions(kind="sapo", kl="k3", kl_coef=0.5, entropy_coef=0.3),
    "cispo": LossOptions(kind="cispo", clip_low=0.5, clip_high=0.5),
    "cispo, all of it": LossOptions(
        kind="cispo", clip_low=1.0, kl="k1", kl_coef=0.5, entropy_coef=-0.3, correction="mask", correction_cap=1.5
    ),
}
"""Losses with large coefficients, so that an error in one term exceeds rounding."""


@dataclass
class Outcome:
    """The result of a loss function: the scalar, [n] weighted losses and log-probs, and the gradients of its inputs."""

    loss: Tensor
    losses: Tensor
    logprob: Tensor
    gradients: tuple[Tensor, ...]


LossFunction = Callable[[tuple[Tensor, ...], dict[str, Any]], Outcome]
"""(logits [n, V], or hidden states [n, H] and weight [V, H]; the other arguments of `fused_grpo_loss`) -> `Outcome`."""


def own_loss(backend: str) -> LossFunction:
    """This project's loss, with one backend."""

    def run(inputs: tuple[Tensor, ...], arguments: dict[str, Any]) -> Outcome:
        leaves = tuple(x.clone().requires_grad_() for x in inputs)
        function: Any = grpo_kernels.fused_grpo_loss if len(leaves) == 1 else grpo_kernels.linear_grpo_loss
        loss, metrics = function(*leaves, backend=backend, **arguments)
        return Outcome(loss.detach(), metrics.loss, metrics.logprob, torch.autograd.grad(loss, leaves))

    return run


def check_losses(functions: dict[str, LossFunction], device: torch.device) -> list[str]:
    """A line for each error beyond rounding; runs every setting, with and without old log-probs."""
    wrong = []
    for dtype in (torch.float32, torch.bfloat16):
        for inputs in made_up_inputs(dtype, device):
            source = "logits" if len(inputs) == 1 else "hidden states"
            for name, options in LOSSES.items():
                for on_policy in (False, True):
                    arguments = made_up_arguments(inputs, options, on_policy)
                    exact = exact_of(inputs, arguments)
                    where = f"{name}{', on-policy' if on_policy else ''}, {source}, {dtype}"
                    for owner, function in functions.items():
                        errors = errors_of(function(inputs, arguments), exact, arguments["token_weight"] != 0)
                        wrong += [
                            f"{owner}: {where}: {what} error {error:.1e}, limit {limit:.0e}"
                            for what, error in errors.items()
                            # Not `error > limit`, which would let NaN pass.
                            if not error <= (limit := limit_of(what, dtype))
                        ]
    return wrong


def made_up_inputs(dtype: torch.dtype, device: torch.device) -> list[tuple[Tensor, ...]]:
    """Synthetic inputs: logits, and hidden states with a weight."""
    draw = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(COUNT, COLUMNS, generator=draw)
    hidden, weight = torch.randn(COUNT, HIDDEN, generator=draw), 0.5 * torch.randn(COLUMNS, HIDDEN, generator=draw)
    return [tuple(x.to(device, dtype) for x in inputs) for inputs in ((logits,), (hidden, weight))]


def made_up_arguments(inputs: tuple[Tensor, ...], options: LossOptions, on_policy: bool) -> dict[str, Any]:
    """Synthetic arguments: old, reference and sampled log-probs so distant that each bound binds for some tokens,
    advantages of both signs and 0, sequences of many lengths; on-policy, old log-probs are the current ones.
    """
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(COLUMNS, (COUNT,), generator=draw)
    logprob = reference.log_softmax(logits_of(inputs), TEMPERATURE).gather(1, ids[:, None])[:, 0]
    old, ref, rollout = (logprob + scale * torch.randn(COUNT, generator=draw) for scale in (0.7, 0.7, 1.0))
    lengths = torch.tensor([4, 0, 9, 1, 8, 7, 3, 8])
    # Whole sequences are shifted, so that bounds on a sequence's ratio bind as well.
    old += torch.tensor([0.5, 0.0, -0.5, 0.5, -0.5, 0.5, -0.5, 0.5]).repeat_interleave(lengths)
    token_weight = torch.rand(COUNT, generator=draw)
    token_weight[::7] = 0.0
    signs = torch.tensor([1.0, 1.0, -1.5, 0.0, 1.5, -1.0, 1.0, -0.5])
    vectors = {
        "ids": ids,
        "old_logprob": None if on_policy else old.float(),
        "ref_logprob": ref.float(),
        "advantages": signs.repeat_interleave(lengths),
        "token_weight": token_weight / COUNT,
        "rollout_logprob": rollout.float(),
        "cu_seqlens": torch.cat([torch.zeros(1), lengths.cumsum(0)]).long() if options.per_sequence else None,
    }
    on_device = {name: None if vector is None else vector.to(inputs[0].device) for name, vector in vectors.items()}
    return on_device | {"options": options, "temperature": TEMPERATURE}


def logits_of(inputs: tuple[Tensor, ...]) -> Tensor:
    """[n, V] logits in float64, on the CPU."""
    inputs = tuple(x.cpu().double() for x in inputs)
    return inputs[0] if len(inputs) == 1 else inputs[0] @ inputs[1].t()


def exact_of(inputs: tuple[Tensor, ...], arguments: dict[str, Any]) -> Outcome:
    """Outcome in float64, from the formulas."""
    on_cpu = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in arguments.items()}
    exact = reference.grpo_loss(logits_of(inputs), **on_cpu)
    gradients: tuple[Tensor, ...] = (exact.gradient,)
    if len(inputs) == 2:
        hidden, weight = (x.cpu().double() for x in inputs)
        gradients = (exact.gradient @ weight, exact.gradient.t() @ hidden)
    return Outcome(exact.loss.sum(), exact.loss, exact.logprob, gradients)


def errors_of(outcome: Outcome, exact: Outcome, counted: Tensor) -> dict[str, float]:
    """{name: error}; the error of log-probs counts only tokens of nonzero weight."""
    counted, largest = counted.cpu(), float(exact.losses.abs().max())

    def apart(a: Tensor, b: Tensor) -> Tensor:
        return a.cpu().double() - b

    errors = {
        "loss": float(apart(outcome.loss, exact.loss).abs()) / float(exact.losses.abs().sum()),
        "token loss": float(apart(outcome.losses, exact.losses).abs().max()) / largest,
        "log-prob": float(apart(outcome.logprob, exact.logprob)[counted].abs().max()),
    }
    names = ("gradient",) if len(exact.gradients) == 1 else ("hidden gradient", "weight gradient")
    for name, ours, right in zip(names, outcome.gradients, exact.gradients, strict=True):
        errors[name] = float(apart(ours, right).norm() / right.norm())
    return errors


def limit_of(what: str, dtype: torch.dtype) -> float:
    """Limit of an error; larger for gradients in bfloat16, which are rounded."""
    return ROUNDED if "gradient" in what and dtype == torch.bfloat16 else VALUES
