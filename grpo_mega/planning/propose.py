"""A layout for a run on the machines that it is meant for: of those that fit, the one that should cost least time.

The costs are rough shares of a step's time, not predictions: what every user does first, from what is usual (Narayanan
et al., arXiv 2104.04473: tensor parallelism within a machine, pipelines across; recomputation of all layers is a third
more work). They only order the candidates; which of them fit, the plan says.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, replace
from itertools import product
from math import ceil, inf, log2
from typing import Any

from grpo_mega.config.rules import ConfigError, check_config, check_layout
from grpo_mega.config.schema import Config, LayoutConfig
from grpo_mega.config.teacher import check_teacher, read_teacher
from grpo_mega.planning.inventory import Role, Stage
from grpo_mega.planning.memory import MAY_BE_PLANNED, memory
from grpo_mega.planning.plan import plan, roles_beside, roles_of, vocabulary

SIZES = (1, 2, 4, 8, 16, 32, 64)
RECOMPUTE = {"none": 1.0, "full": 4 / 3}
"""Setting -> factor on the time of a forward and backward pass."""
MICRO_BATCHES = 16
"""Micro-batches of an update that a pipeline's bubble is judged by."""
TOLERATED = 1.1
"""How far an estimate may be above the limit, and the layout is still planned exactly."""


def propose(config: Config) -> Config:
    """The configuration with the cheapest layout that fits `config.cluster`, one machine if it gives no number.

    Replaces the sizes and the recomputation of `layout`, `optimizer.distributed` and `overlap`, and the size of
    engines; everything else, such as `layout.micro_batch_tokens`, stays. Call `platform.start_planning` first.

    Raises:
        ConfigError: The GPUs' memory is not given, or no layout fits.
    """
    cluster = config.cluster
    if cluster.gpu_memory_mib is None:
        raise ConfigError("cluster.gpu_memory_mib is not set, and a layout is to fit it; give it, or cluster=h100")
    gpus = (cluster.nodes or 1) * cluster.gpus_per_node
    policy, *others = roles_of(replace(config, layout=LayoutConfig()), vocabulary(config), 1)
    teacher = next((role for role in others if role.name == "teacher"), None)
    limit, smallest = MAY_BE_PLANNED * cluster.gpu_memory_mib * 2**20, inf
    for candidate in candidates(config):
        size = _about(candidate, policy.stages[0], teacher, gpus)
        smallest = min(smallest, size)
        if size > TOLERATED * limit:  # building it to be exact would take a second
            continue
        planned = plan(candidate)
        if planned["fits"] and (fitting := _with_engine(candidate, planned)):
            return fitting
    if smallest == inf:
        raise ConfigError(f"{gpus} GPUs cannot be arranged for this model in any layout; change cluster.nodes")
    raise ConfigError(
        f"no layout of {gpus} GPUs fits: the smallest takes about {smallest / 1e9:.1f} GB of a GPU, and "
        f"{limit / 1e9:.1f} may be planned; raise cluster.nodes, or lower model.context and layout.micro_batch_tokens"
    )


def differing(config: Config, other: Config) -> list[tuple[str, Any]]:
    """The (dotted name, value) of each setting in which the `other` configuration differs."""

    def leaves(node: Any, name: str) -> Iterator[tuple[str, Any]]:
        if isinstance(node, dict):
            for key, child in node.items():
                yield from leaves(child, f"{name}.{key}".lstrip("."))
        else:
            yield name, node

    before = dict(leaves(asdict(config), ""))
    return [(name, value) for name, value in leaves(asdict(other), "") if before.get(name) != value]


def candidates(config: Config) -> Iterator[Config]:
    """The configuration with each layout that the rules allow for this model on these GPUs, the cheapest first."""
    config = replace(config, cluster=replace(config.cluster, nodes=config.cluster.nodes or 1))
    teacher = read_teacher(config)
    gpus_per_node = config.cluster.gpus_per_node
    gpus = (config.cluster.nodes or 1) * gpus_per_node
    experts = config.model.moe.experts or (teacher is not None and teacher.model.moe.experts)
    inside = [size for size in SIZES if size <= gpus_per_node]
    even = replace(config.layout, vpp=1, first_stage_layers=None, last_stage_layers=None, etp=1)
    layouts = [
        replace(even, tp=tp, pp=pp, cp=cp, ep=ep, sp=tp > 1, recompute=recompute)
        for tp, pp, cp, ep, recompute in product(inside, SIZES, SIZES, SIZES if experts else [1], RECOMPUTE)
        if gpus % (tp * pp * cp) == 0 and gpus // pp % ep == 0
    ]
    for layout in sorted(layouts, key=lambda layout: _cost(layout, gpus_per_node)):
        several = gpus > layout.tp * layout.pp  # replicas, which share the optimizer's state
        candidate = replace(config, layout=layout)
        candidate.optimizer = replace(config.optimizer, distributed=several, overlap=several)
        try:
            check_config(candidate)
            check_layout(candidate, gpus)
            if teacher:
                check_teacher(candidate, teacher)
        except ConfigError:
            continue
        yield candidate


def _about(config: Config, whole: Stage, teacher: Role | None, gpus: int) -> float:
    """About how many bytes of a GPU the trainer takes, from the parameters of whole models shared out evenly."""
    stages = config.layout.pp
    part = _share(whole, config.layout, gpus)
    taught = teacher and replace(teacher, stages=[_share(teacher.stages[0], config.layout, gpus)] * stages)
    roles = roles_beside(config, [part] * stages, [part] * stages, taught)
    return max(sum(memory(config, roles, number, vocabulary(config)).values()) for number in range(stages))


def _share(whole: Stage, layout: LayoutConfig, gpus: int) -> Stage:
    """What a GPU has of a whole model, shared out evenly."""
    stages = layout.pp
    return replace(
        whole,
        layers=ceil(whole.layers / stages),
        moe_layers=ceil(whole.moe_layers / stages),
        dense=ceil(whole.dense / stages / layout.tp),
        experts=ceil(whole.experts / stages / layout.ep / layout.etp),
        trained_dense=ceil(whole.trained_dense / stages / layout.tp),
        trained_experts=ceil(whole.trained_experts / stages / layout.ep / layout.etp),
        replicas=gpus // stages // layout.tp,
        expert_replicas=gpus // stages // layout.ep // layout.etp,
    )


def _with_engine(config: Config, planned: dict[str, Any]) -> Config | None:
    """The configuration with the smallest engines that fit; None when none do."""
    for size in SIZES:
        if planned["engine"] is None or planned["engine"]["fits"]:
            return config
        if size > config.cluster.gpus_per_node or planned["gpus"] % size:
            return None
        config = deepcopy(config)
        config.rollout.sglang.tp = size
        try:
            check_config(config)
        except ConfigError:
            continue
        planned = plan(config)
    return None


def _cost(layout: LayoutConfig, gpus_per_node: int) -> float:
    """Time of an update as a multiple of that of data parallelism alone."""
    across = layout.tp * layout.cp > gpus_per_node  # context parallelism then leaves the machine
    bubble = 1 + (layout.pp - 1) / MICRO_BATCHES
    tensor = 1 + 0.08 * log2(layout.tp)
    context = 1 + (0.15 if across else 0.06) * log2(layout.cp)
    experts = 1 + (0.04 if layout.ep <= gpus_per_node else 0.08) * log2(layout.ep)
    return RECOMPUTE[layout.recompute] * bubble * tensor * context * experts
