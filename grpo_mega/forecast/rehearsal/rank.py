"""Rehearses a step as one rank of a job: `rehearse`."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from grpo_mega.algorithm.objective import Loss
from grpo_mega.config.schema import REWARD_MODELS
from grpo_mega.forecast.rehearsal import stand_ins, world
from grpo_mega.forecast.rehearsal.measure import DoesNotFit, Rehearsal
from grpo_mega.forecast.rehearsal.spec import RankSpec
from grpo_mega.forecast.rehearsal.step import reward_model_step, step
from grpo_mega.platform import Platform


def rehearse(spec: RankSpec, platform: Platform, loss: Loss, on_policy: bool) -> dict[str, Any]:
    """The phases of one step as the rank that `spec` names, on the null GPU: numbers that JSON can hold.

    Args:
        spec: The rank and its sequences.
        platform: Of this process, whose device is the null GPU.
        loss: Of an update of a policy.
        on_policy: Whether a step has one update, which needs no log-probs before it.
    """
    config = spec.config
    topology = world.join_alone(config.layout, spec.rank, spec.world_size, config.run.seed)
    stand_ins.apply(spec)
    rehearsal = Rehearsal()
    with suppress(DoesNotFit):
        if config.run.trains in REWARD_MODELS:
            reward_model_step(spec, platform, topology, rehearsal)
        else:
            step(spec, platform, topology, loss, on_policy, rehearsal)
    return {
        "rank": spec.rank,
        "stage": topology.pp_rank,
        "sequences": spec.sequences,
        "lengths": list(spec.lengths),
        "imbalance": spec.imbalance,
        "transformer_engine": platform.transformer_engine,
        "taken": spec.taken,
        "capacity": spec.capacity,
        "phases": rehearsal.phases,
        "failure": rehearsal.failure,
        "stand_ins": {stand_in.name: stand_in.reason for stand_in in stand_ins.STAND_INS},
    }
