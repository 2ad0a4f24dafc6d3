"""AdamW behind Megatron's optimizers, plain and distributed, and the learning rate as a pure function of the step."""

from __future__ import annotations

from typing import Any

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, distrib_optimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

from grpo_mega.config.schema import OptimizerConfig


class GroupStepAdamW(torch.optim.AdamW):
    """torch's AdamW with the step count in the parameter group, where Transformer Engine's FusedAdam keeps it.

    Megatron's distributed optimizer saves and loads that form only: with torch's per-parameter step it refuses to
    save, and a loaded state shares one step tensor that every parameter then advances.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, **_: Any):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, foreach=False)

    def __setstate__(self, state: dict) -> None:
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One AdamW update of every group."""
        for group in self.param_groups:
            done = torch.tensor(float(group.get("step", 0)))
            for p in group["params"]:
                state = self.state[p]
                if "exp_avg" not in state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["step"] = done.clone()
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                del self.state[p]["step"]
            group["step"] = int(group.get("step", 0)) + 1
        return loss


def build_optimizer(
    config: OptimizerConfig, model: list[DistributedDataParallel], dtype: torch.dtype, distributed: bool
) -> MegatronOptimizer:
    """Megatron's optimizer over this rank's parameters; `distributed` shards its state over the replicas.

    Weight decay spares norms and biases. Where neither Transformer Engine nor Apex is installed, Megatron's fallback to
    torch's AdamW is replaced by `GroupStepAdamW`: it has no argument for the class to use.
    """
    if megatron_optimizer.USING_PYTORCH_OPTIMIZER:  # neither Transformer Engine nor Apex is installed
        megatron_optimizer.Adam = GroupStepAdamW
        megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
        distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
    options = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
    )
    optimizer = get_megatron_optimizer(options, model)
    for group in optimizer.param_groups:
        # Megatron marks norms and biases with wd_mult 0, but leaves it to its own scheduler to obey that.
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    _start_moments(optimizer)
    return optimizer


def _start_moments(optimizer: MegatronOptimizer) -> None:
    """Zero moments for every parameter: a checkpoint from before the first update must hold what loading expects."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        part.init_state_fn(part.optimizer, part.config)


def set_learning_rate(optimizer: MegatronOptimizer, lr: float) -> None:
    """Sets every parameter group's learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)


def warmed_up(lr: float, warmup_steps: int, update: int) -> float:
    """Learning rate of optimizer update number `update` (from 0): linear warm-up, then constant."""
    return lr * min(1.0, (update + 1) / warmup_steps) if warmup_steps else lr
