"""AdamW in Megatron's optimizers, plain and distributed, and with a lean state."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

from grpo_mega.config.schema import OptimizerConfig
from grpo_mega.errors import InputError
from grpo_mega.models.megatron.adam import is_lean
from grpo_mega.models.megatron.changes import BEFORE_OPTIMIZER, TO_OPTIMIZER, apply_changes
from grpo_mega.models.parts import group_overrides


def build_optimizer(
    config: OptimizerConfig, model: list[DistributedDataParallel], dtype: torch.dtype, distributed: bool, tied: bool
) -> MegatronOptimizer:
    """Megatron's optimizer over this rank's parameters; `distributed` shards its state over the replicas.

    Weight decay does not apply to norms and biases. `tied` says whether the output layer is the embedding.

    Raises:
        InputError: A lean state needs `distributed`.
    """
    if is_lean(config.state) and not distributed:
        what = f"{config.state} needs Megatron's distributed optimizer"
        raise InputError("optimizer.state", what, "set optimizer.distributed=true")
    apply_changes(BEFORE_OPTIMIZER, config.state)
    options = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        # Megatron's scheduler is not used: `set_learning_rate` sets the rate before every update.
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
    # The gradients' place and the state are the inner optimizer's. Megatron's own setting for this
    # (use_precision_aware_optimizer) insists on Transformer Engine's.
    options.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = is_lean(config.state)
    optimizer = get_megatron_optimizer(options, model, group_overrides(config.parts, tied))
    apply_changes(TO_OPTIMIZER, optimizer)
    return optimizer


def set_learning_rate(optimizer: MegatronOptimizer, lr: float) -> None:
    """Sets every parameter group's learning rate: `lr` times the multiplier of its part."""
    for group in optimizer.param_groups:
        # Megatron applies the multiplier in its own scheduler only.
        group["lr"] = lr * group["lr_mult"]
