"""What a run will take on every GPU, before it is submitted: parameters and bytes of a rank of every pipeline stage."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

from grpo_mega.config.reward_model import check_reward_model, read_reward_model
from grpo_mega.config.rules import ConfigError, check_layout, fewest_processes
from grpo_mega.config.schema import REWARD_MODELS, Config, ModelConfig
from grpo_mega.config.teacher import check_teacher, read_teacher
from grpo_mega.data.tokenizer import character_tokenizer
from grpo_mega.forecast.planning.inventory import (
    Role,
    StageInventory,
    adapters_alone,
    elements,
    take_stock,
    total,
    trained_elements,
)
from grpo_mega.forecast.planning.memory import (
    MAY_BE_PLANNED,
    held,
    leaves,
    memory,
    saved_state_bytes,
    state_on_host,
    weight_bytes,
)
from grpo_mega.forecast.planning.saving import saving
from grpo_mega.forecast.planning.supplies import MAIN_MEMORY, checkpoints_at_once, exports_in_all
from grpo_mega.models.parts import frozen_parts
from grpo_mega.models.scalar import REWARD_MODEL
from grpo_mega.rollout.sglang.memory import plan_engine


def plan(config: Config) -> dict[str, Any]:
    """What a run takes, in parameters and bytes, all of it JSON; call `platform.start_planning` first.

    Raises:
        ConfigError: The GPUs cannot be arranged in the layout, or nothing says how large the vocabulary is.
        ValueError: A teacher's files cannot be read.
    """
    cluster, layout = config.cluster, config.layout
    gpus = fewest_processes(layout)
    if cluster.nodes:
        gpus = cluster.nodes * cluster.gpus_per_node
    elif cluster.gpu_memory_mib:  # machines are given, as cluster=h100 does, though not how many
        gpus = math.lcm(gpus, cluster.gpus_per_node)
    counted = (
        f"cluster.nodes={cluster.nodes} * cluster.gpus_per_node={cluster.gpus_per_node} =" if cluster.nodes else ""
    )
    check_layout(config, gpus, counted or "the number of GPUs")
    vocab_size = vocabulary(config)
    if teacher := read_teacher(config):
        check_teacher(config, teacher)
    roles = roles_of(config, vocab_size, gpus)
    policy, numbers = roles[0], range(layout.pp)
    parameters, ahead = total(policy.stages)
    memories = [memory(config, roles, number, vocab_size) for number in numbers]
    totals = [sum(lines.values()) for lines in memories]
    capacity = cluster.gpu_memory_mib * 2**20 if cluster.gpu_memory_mib else None
    limit = MAY_BE_PLANNED * capacity if capacity else None
    host = min(gpus, cluster.gpus_per_node) * max(
        leaves(held(config, roles, number))
        + state_on_host(config, roles, number)
        + _average(config, policy.stages[number])
        for number in numbers
    )
    copies = max(saving(config, roles, number, gpus) for number in numbers)
    main_memory = cluster.host_memory_gib * 2**30 if cluster.host_memory_gib else None
    size, export = checkpoint(config, roles), weight_bytes(config) * (parameters + ahead)
    return {
        "experiment": config.run.name,
        "parameters": parameters,
        "adapters": elements([adapters_alone(stage) for stage in policy.stages]) if config.lora.rank else 0,
        "prediction_parameters": ahead,
        "gpus": gpus,
        "layout": asdict(layout) | {"dp": gpus // (layout.tp * layout.pp * layout.cp)},
        "stages": [{key: value for key, value in asdict(stage).items() if key != "whole"} for stage in policy.stages],
        "memory": memories,
        "static": [sum(held(config, [policy], number).values()) for number in numbers],
        "total": totals,
        "checkpoint": size,
        "export": export,
        "disk": checkpoints_at_once(config.run) * size + exports_in_all(config.run) * export,
        "host": host,
        "saving": copies,
        "main_memory": main_memory,
        "host_fits": host + copies <= MAIN_MEMORY * main_memory if main_memory else None,
        "capacity": capacity,
        "limit": limit,
        "fits": max(totals) <= limit if limit else None,
        "engine": engine_of(config, vocab_size, gpus, roles) if config.rollout.engine == "sglang" else None,
    }


def engine_of(config: Config, vocab_size: int, gpus: int, roles: list[Role]) -> dict[str, Any] | None:
    """Memory of an engine that shares the GPUs; None when their size is not given, or the engine has its own GPUs."""
    mib, algorithm = config.cluster.gpu_memory_mib, config.algorithm
    if mib is None or config.rollout.sglang.first_gpu is not None:
        return None
    capacity = mib * 2**20
    weights = max(held(config, roles, number)["weights"] for number in range(config.layout.pp))
    engine = plan_engine(config, vocab_size, weights, capacity)
    peak = sum(engine["hand-over"].values())
    excess = sum(engine["generation"].values()) - capacity  # SGLang fills its share of a GPU
    engines = gpus // config.rollout.sglang.tp
    return engine | {
        "engines": engines,
        "samples": -(-algorithm.prompts_per_step // engines) * algorithm.group_size,
        "peak": peak,
        "excess": max(0.0, excess),
        "fits": peak <= MAY_BE_PLANNED * capacity and excess <= 0 and engine["longest"] > 0,
    }


def roles_of(config: Config, vocab_size: int, gpus: int) -> list[Role]:
    """The models of a run, the one that it trains first; of a teacher and a reward model the configuration is read."""
    if config.run.trains in REWARD_MODELS:
        scalar = take_stock(config.model, config.layout, vocab_size, gpus, scalar=True)
        return [Role(REWARD_MODEL, True, True, scalar)]
    stages = take_stock(config.model, config.layout, vocab_size, gpus, frozen=config.optimizer.frozen, lora=config.lora)
    teacher = None
    if taught := read_teacher(config):  # which knows the policy's tokens
        size = taught.model.vocab_size or vocab_size
        teacher = Role("teacher", False, False, take_stock(taught.model, config.layout, size, gpus), taught.model)
    scalar = take_stock(config.model, config.layout, vocab_size, gpus, scalar=True) if scalar_models(config) else []
    roles = roles_beside(config, stages, scalar, teacher)
    preferred = read_reward_model(config)
    if preferred is None:
        return roles
    check_reward_model(config, preferred)
    own = take_stock(preferred, config.layout, preferred.vocab_size or vocab_size, gpus, scalar=True)
    return with_reward_model(roles, own, preferred)


def with_reward_model(roles: list[Role], stages: list[StageInventory], model: ModelConfig) -> list[Role]:
    """The models of a run, in which the reward model has stages and an architecture of its own."""
    return [replace(role, stages=stages, model=model) if role.name == REWARD_MODEL else role for role in roles]


def scalar_models(config: Config) -> list[Role]:
    """The models with a scalar head beside a policy, without their stages: a critic, a reward model."""
    critic = [Role("critic", True, True, [])] if config.algorithm.advantage_baseline == "critic" else []
    return critic + ([Role(REWARD_MODEL, False, False, [])] if config.reward.model.path is not None else [])


def roles_beside(
    config: Config, stages: list[StageInventory], scalar: list[StageInventory], teacher: Role | None = None
) -> list[Role]:
    """The policy, of these stages; what the KL term compares it with, if there is one: a frozen copy of it, or of its
    adapters; models with a scalar head, of the other stages, if the run has any; and a teacher, if there is one."""
    policy = Role("policy", True, True, stages)
    copied = [adapters_alone(stage) for stage in policy.stages] if config.lora.rank else policy.stages
    reference = [Role("reference policy", False, True, copied)] if config.algorithm.kl_coef else []
    beside = [replace(role, stages=scalar) for role in scalar_models(config)]
    return [policy, *reference, *beside, *([teacher] if teacher else [])]


def _average(config: Config, stage: StageInventory) -> int:
    """Bytes of the host that an average of the weights takes for a GPU of this stage, with the weights it replaces."""
    trained = stage.trained_dense + stage.trained_experts
    return (4 + weight_bytes(config)) * trained if config.optimizer.average_decay else 0


def checkpoint(config: Config, roles: list[Role]) -> int:
    """Bytes of a checkpoint: weights, the state of Adam for what is trained, and the policy's average if there is one.

    The average is in fp32, beside what is not trained as it is; that of adapters is alone.
    """
    kept = frozen_parts(config.optimizer.frozen, config.lora if config.lora.rank else None)
    size = 0
    for role in roles:
        trained = trained_elements(role.stages, kept, config.model.tie_embeddings) if role.trained else 0
        weights = weight_bytes(config) * elements(role.stages)
        size += (weights + saved_state_bytes(config) * trained) if role.saved else 0
        if config.optimizer.average_decay and role is roles[0]:
            size += 4 * trained + (0 if config.lora.rank else weights - weight_bytes(config) * trained)
    return size


def vocabulary(config: Config) -> int:
    """Rows that the model's vocabulary needs. A plan reads no files, so no tokenizer but the one built in.

    Raises:
        ConfigError: The tokenizer is another, and `model.vocab_size` is not given.
    """
    if config.model.vocab_size is None and config.data.tokenizer != "chars":
        raise ConfigError(
            f"model.vocab_size is null, and a plan does not open data.tokenizer={config.data.tokenizer}; give "
            "model.vocab_size, as in the model's config.json"
        )
    return config.model.vocab_size or character_tokenizer(config.data).vocab_size
