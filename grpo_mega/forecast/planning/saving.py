"""Main memory that a checkpoint takes on its way to files, beside what the trainer keeps there."""

from __future__ import annotations

from grpo_mega.config.schema import Config
from grpo_mega.forecast.planning.inventory import Role
from grpo_mega.forecast.planning.memory import saved_state_bytes, weight_bytes


def saving(config: Config, roles: list[Role], number: int, gpus: int) -> float:
    """Bytes of a machine's main memory that copies take until they are written, where GPUs are of stage `number`.

    Every GPU copies its own part of Adam's state (`models/megatron/own_shards.py`), and those of the first replica the
    weights. Models are written one after the other, but with `run.async_save` all that move with updates at once.

    Args:
        config: The run's.
        roles: Its models, see `plan.roles_of`.
        number: The pipeline stage.
        gpus: All GPUs of the run.
    """
    here = min(gpus, config.cluster.gpus_per_node)
    of_stage = gpus // config.layout.pp
    saved = {role.name: _copies(config, role, number, here, of_stage) for role in roles if role.saved}
    if config.run.async_save:
        return max(sum(saved[role.name] for role in roles if role.trained), *saved.values())
    return max(saved.values())


def _copies(config: Config, role: Role, number: int, here: int, of_stage: int) -> float:
    """Bytes of the copies of one model on a machine with GPUs `here`, where its stage has so many in all."""
    stage, layout = role.stages[number], config.layout
    stages_here = -(-here // of_stage)
    size = 0.0
    for weights, trained, replicas, split in (
        (stage.dense, stage.trained_dense, stage.replicas, layout.tp),
        (stage.experts, stage.trained_experts, stage.expert_replicas, layout.ep * layout.etp),
    ):
        first = min(here, split * stages_here)  # GPUs of the first replica
        state = saved_state_bytes(config) * trained if role.trained else 0
        size += first * weight_bytes(config) * weights
        size += here * state / replicas if config.optimizer.distributed else first * state
    return size
