"""AdamW behind Megatron's optimizers, plain and distributed, and the learning rate as a pure function of the step."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

from grpo_mega.config.schema import OptimizerConfig
from grpo_mega.models.megatron.changes import BEFORE_OPTIMIZER, TO_OPTIMIZER, apply_changes


def build_optimizer(
    config: OptimizerConfig, model: list[DistributedDataParallel], dtype: torch.dtype, distributed: bool
) -> MegatronOptimizer:
    """Megatron's optimizer over this rank's parameters; `distributed` shards its state over the replicas.

    Weight decay spares norms and biases.
    """
    apply_changes(BEFORE_OPTIMIZER, None)
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
    apply_changes(TO_OPTIMIZER, optimizer)
    return optimizer


def set_learning_rate(optimizer: MegatronOptimizer, lr: float) -> None:
    """Sets every parameter group's learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)


def warmed_up(lr: float, warmup_steps: int, update: int) -> float:
    """Learning rate of optimizer update number `update` (from 0): linear warm-up, then constant."""
    return lr * min(1.0, (update + 1) / warmup_steps) if warmup_steps else lr
