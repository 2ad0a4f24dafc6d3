"""Gradient noise scale from Adam's moments, without further passes or gradients.

The gradient of a mini-batch is g = G + noise, where G is the gradient over infinitely many samples and the noise of a
mini-batch of B sequences has variance tr(S) / B, summed over the parameters. Adam holds an average of g and one of g^2.
Averaged over many gradients the noise cancels in the first but not in the second, which separates G and the noise.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared


def noise_in_batches(first: float, second: float, updates: int, beta1: float, beta2: float) -> float | None:
    """The gradient noise scale tr(S) / |G|^2 (McCandlish et al., 2018, arXiv 1812.06162, equation 2.9) over B.

    It is estimated over the last 1 / (1 - beta1) updates or so, as if neither G nor S had changed meanwhile. With c the
    sum of the squares of the weights that Adam's average gives to its gradients, and bias-corrected moments m and v,

        E sum(v) = |G|^2 + tr(S) / B        E sum(m^2) = |G|^2 + c tr(S) / B

    Args:
        first: sum(m^2) over all parameters, before the bias correction.
        second: sum(v) over all parameters, before the bias correction.
        updates: Updates that the moments have seen.
        beta1, beta2: Adam's decay rates.

    Returns:
        The noise scale in mini-batches: far below 1, smaller ones would point in nearly the same direction; far above,
        larger ones would help. None when it cannot be estimated: before the second update, without an average (beta1 of
        0), or when no gradient is detectable in the noise.
    """
    if updates < 2 or beta1 == 0:
        return None
    known1, known2 = 1 - beta1**updates, 1 - beta2**updates
    c = (1 - beta1) * (1 + beta1**updates) / ((1 + beta1) * known1)
    mean_squared, square = first / known1**2, second / known2
    noise, signal = square - mean_squared, mean_squared - c * square
    return max(noise, 0.0) / signal if signal > 0 else None


def moment_sums(optimizer: MegatronOptimizer) -> tuple[float, float]:
    """sum(m^2) and sum(v) over the whole model, before the bias correction; every rank must call it.

    The parameters are those of the gradient norm: each once, without those of prediction modules.
    """
    first = second = 0.0
    # Megatron chains one optimizer for dense parameters and one for experts, each sharded over different ranks.
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        sums = torch.zeros(2, dtype=torch.float64, device=torch.cuda.current_device())
        for parameter in part.get_parameters():
            is_duplicate = not param_is_not_tensor_parallel_duplicate(parameter, getattr(part, "tp_group", None))
            if is_duplicate or not param_is_not_shared(parameter):
                continue
            state = part.optimizer.state[parameter]
            if "exp_avg" not in state:
                continue
            # With `optimizer.state.on_host` the moments are in host memory, but NCCL reduces on the device.
            mean, square = (state[name].to(sums.device) for name in ("exp_avg", "exp_avg_sq"))
            sums[0] += torch.linalg.vector_norm(mean, dtype=torch.float64) ** 2
            sums[1] += square.sum(dtype=torch.float64)
        dist.all_reduce(sums, group=part.get_grad_stats_parallel_group())
        first, second = first + sums[0].item(), second + sums[1].item()
    return first, second
