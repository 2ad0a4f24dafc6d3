"""What a run will take on every GPU, before it is submitted: parameters and bytes of a rank of every pipeline stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from grpo_mega.config.rules import check_layout, fewest_processes
from grpo_mega.config.schema import REWARD_MODELS, ClusterConfig, Config, DataConfig, ModelConfig, RunConfig
from grpo_mega.config.trained_model import check_reward_model, check_teacher, read_reward_model, read_teacher
from grpo_mega.data.tokenizer import character_tokenizer
from grpo_mega.errors import InputError
from grpo_mega.forecast.planning.inventory import (
    Role,
    adapters_alone,
    elements,
    take_stock,
    total,
    trained_elements,
)
from grpo_mega.forecast.planning.lines import MAIN_MEMORY, checkpoints_at_once, exports_in_all
from grpo_mega.forecast.planning.memory import MAY_BE_PLANNED, Trainer, held, leaves, memory, optimizer_state
from grpo_mega.models.parts import frozen_parts
from grpo_mega.models.scalar import REWARD_MODEL
from grpo_mega.rollout.sglang.memory import plan_engine


def plan(config: Config) -> dict[str, Any]:
    """What a run takes, in parameters and bytes, as JSON; call `platform.start_planning` first.

    Raises:
        InputError: The GPUs cannot be arranged in the layout, the size of the vocabulary is not given, or a teacher's
            files cannot be read.
    """
    # The GPUs, and whether the layout can arrange them.
    cluster, layout, trainer = config.cluster, config.layout, Trainer.of(config)
    gpus = fewest_processes(layout)
    if cluster.nodes:
        gpus = gpus_of(cluster)
    # The kind of machine is given, as by cluster=h100, but not the number: the fewest whole machines.
    elif cluster.gpu_memory_mib:
        gpus = math.lcm(gpus, cluster.gpus_per_node)
    counted = (
        f"cluster.nodes={cluster.nodes} * cluster.gpus_per_node={cluster.gpus_per_node} =" if cluster.nodes else ""
    )
    check_layout(config, gpus, counted or "the number of GPUs")
    vocab_size = planned_vocabulary(config.model, config.data)
    if teacher := read_teacher(config.distill, config.model):
        check_teacher(config, teacher)
    # The models, and what they take of each GPU, of a machine's main memory and of the disk.
    roles = roles_of(config, vocab_size, gpus)
    policy, numbers = roles[0], range(layout.pp)
    parameters, predictors = total(policy.stages)
    memories = [memory(config, roles, number, vocab_size) for number in numbers]
    totals = [sum(lines.values()) for lines in memories]
    capacity = cluster.gpu_memory_mib * 2**20 if cluster.gpu_memory_mib else None
    limit = MAY_BE_PLANNED * capacity if capacity else None
    here = min(gpus, cluster.gpus_per_node)
    host = here * max(_leaves_gpu(trainer, roles, number) for number in numbers)
    copies = max(_copies_of_a_save(trainer, config.run, roles, number, here, gpus) for number in numbers)
    main_memory = cluster.host_memory_gib * 2**30 if cluster.host_memory_gib else None
    size, export = checkpoint(trainer, roles), trainer.weight_bytes * (parameters + predictors)
    return {
        "experiment": config.run.name,
        "parameters": parameters,
        "adapters": elements([adapters_alone(stage) for stage in policy.stages]) if config.lora.rank else 0,
        "prediction_parameters": predictors,
        "gpus": gpus,
        "layout": asdict(layout) | {"dp": gpus // (layout.tp * layout.pp * layout.cp)},
        "stages": [{key: value for key, value in asdict(stage).items() if key != "whole"} for stage in policy.stages],
        "memory": memories,
        "static": [sum(held(trainer, [policy], number).values()) for number in numbers],
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
        "engine": engine_of(config, vocab_size, gpus, roles),
    }


def gpus_of(cluster: ClusterConfig) -> int:
    """GPUs, or processes, of the machines; of one machine if their number is not given."""
    return (cluster.nodes or 1) * cluster.gpus_per_node


def planned_vocabulary(model: ModelConfig, data: DataConfig) -> int:
    """Rows of the model's vocabulary. A plan reads no files, so it knows no tokenizer but the built-in one.

    Raises:
        InputError: There is another tokenizer, and `model.vocab_size` is null.
    """
    if model.vocab_size is None and data.tokenizer != "chars":
        raise InputError(
            "model.vocab_size=null",
            f"a plan does not open data.tokenizer={data.tokenizer}",
            "set model.vocab_size, as in the model's config.json",
        )
    return model.vocab_size or character_tokenizer(data).vocab_size


def engine_of(config: Config, vocab_size: int, gpus: int, roles: Sequence[Role]) -> dict[str, Any] | None:
    """Memory of an engine that shares the GPUs, as JSON.

    None for the embedded engine, for engines on other GPUs than the trainer's, and when the GPUs' size is not given.
    """
    mib, algorithm, sglang = config.cluster.gpu_memory_mib, config.algorithm, config.rollout.sglang
    if config.rollout.engine != "sglang" or mib is None or sglang.first_gpu is not None:
        return None
    capacity = mib * 2**20
    trainer = Trainer.of(config)
    weights = max(held(trainer, [*roles], number)["weights"] for number in range(config.layout.pp))
    engine = plan_engine(config, vocab_size, weights, capacity)
    peak = sum(engine["hand-over"].values())
    # Compared with the whole GPU: SGLang takes exactly its share of it.
    excess = sum(engine["generation"].values()) - capacity
    engines = gpus // sglang.tp
    groups = config.rollout.in_flight or algorithm.prompts_per_step
    samples = -(-groups // engines) * algorithm.group_size
    # If each fills its slice; its prompt, and what it sampled before, take room as well.
    longest = config.rollout.longer_max_new_tokens or config.rollout.max_new_tokens
    size = min(config.rollout.slice_tokens or longest, longest)
    waiting = max(0, samples - engine["tokens"] // size) if size < longest else 0
    return engine | {
        "engines": engines,
        "samples": samples,
        "waiting": waiting,
        # A slice cannot have fewer groups in flight than a step takes.
        "could_be_fewer": groups > algorithm.prompts_per_step,
        "peak": peak,
        "excess": max(0.0, excess),
        "fits": peak <= MAY_BE_PLANNED * capacity and excess <= 0 and engine["longest"] > 0,
    }


def roles_of(config: Config, vocab_size: int, gpus: int, *, counted: bool = False) -> list[Role]:
    """The models of a run, the one that it trains first; teacher and reward model are as their own files say.

    See `take_stock` for `counted`.

    Raises:
        ConfigError: The layout cannot split the reward model.
        InputError: A teacher's or reward model's files cannot be read.
    """
    model, layout, lora = config.model, config.layout, config.lora
    if config.run.trains in REWARD_MODELS:
        stages = take_stock(model, layout, vocab_size, gpus, scalar=True, counted=counted)
        return [Role(REWARD_MODEL, True, True, stages)]
    stages = take_stock(model, layout, vocab_size, gpus, frozen=config.optimizer.frozen, lora=lora, counted=counted)
    roles = [Role("policy", True, True, stages)]
    # The reference is a frozen copy of the policy; with adapters a copy of these alone, as the rest is the policy's.
    if config.algorithm.kl_coef:
        copied = [adapters_alone(stage) for stage in stages] if lora.rank else stages
        roles.append(Role("reference policy", False, True, copied))
    if config.algorithm.advantage_baseline == "critic":
        critic = take_stock(model, layout, vocab_size, gpus, scalar=True, counted=counted)
        roles.append(Role("critic", True, True, critic))
    if config.reward.model.path is not None:
        scorer = read_reward_model(config.reward, config.model)
        if scorer:
            check_reward_model(config, scorer)
        size = scorer.vocab_size if scorer else None
        stages = take_stock(scorer or model, layout, size or vocab_size, gpus, scalar=True, counted=counted)
        roles.append(Role(REWARD_MODEL, False, False, stages, scorer))
    # The teacher's vocabulary is the policy's, but may be padded differently.
    if teacher := read_teacher(config.distill, config.model):
        stages = take_stock(teacher.model, layout, teacher.model.vocab_size or vocab_size, gpus, counted=counted)
        roles.append(Role("teacher", False, False, stages, teacher.model))
    return roles


def _leaves_gpu(trainer: Trainer, roles: list[Role], number: int) -> float:
    """Bytes of main memory for a GPU of pipeline stage `number` while an engine has it.

    Holds what the trainer moves there, Adam's state if it always lives there, and the averaged weights together with
    the weights that they replace.
    """
    size = leaves(held(trainer, roles, number))
    if trainer.optimizer.state.on_host:
        size += sum(optimizer_state(trainer, role.stages[number]) for role in roles if role.trained)
    if trainer.optimizer.average_decay:
        policy = roles[0].stages[number]
        size += (4 + trainer.weight_bytes) * (policy.trained_dense + policy.trained_experts)
    return size


def _copies_of_a_save(trainer: Trainer, run: RunConfig, roles: list[Role], number: int, here: int, gpus: int) -> float:
    """Bytes of main memory for a checkpoint's copies until they are written, on a machine with GPUs of stage `number`.

    Models are written one after the other; with `run.async_save`, all trained models are written at once. See
    `_copy_of` for `here` and `gpus`.
    """
    sizes = {role.name: _copy_of(trainer, role, number, here, gpus) for role in roles if role.saved}
    if run.async_save:
        return max(sum(sizes[role.name] for role in roles if role.trained), *sizes.values())
    return max(sizes.values())


def _copy_of(trainer: Trainer, role: Role, number: int, here: int, gpus: int) -> float:
    """Bytes of the copies of one model on a machine with GPUs `here`, of all `gpus` of the run.

    Every GPU copies its own part of Adam's state (`models/megatron/own_shards.py`), those of the first replica also the
    weights.
    """
    stage, layout = role.stages[number], trainer.layout
    stages_here = -(-here // (gpus // layout.pp))
    size = 0.0
    for weights, trained, replicas, split in (
        (stage.dense, stage.trained_dense, stage.replicas, layout.tp),
        (stage.experts, stage.trained_experts, stage.expert_replicas, layout.ep * layout.etp),
    ):
        # GPUs of this machine that belong to the first replica, which alone copies the weights.
        first = min(here, split * stages_here)
        state = trainer.saved_state_bytes * trained if role.trained else 0
        size += first * trainer.weight_bytes * weights
        size += here * state / replicas if trainer.optimizer.distributed else first * state
    return size


def checkpoint(trainer: Trainer, roles: list[Role]) -> int:
    """Bytes of a checkpoint: weights, the state of Adam for what is trained, and the policy's average if there is one.

    The average is fp32 where weights are trained, beside unchanged frozen weights; with adapters it has these alone.
    """
    optimizer, adapters = trainer.optimizer, bool(trainer.lora.rank)
    kept = frozen_parts(optimizer.frozen, trainer.lora if adapters else None)
    size = 0
    for role in roles:
        trained = trained_elements(role.stages, kept, trainer.model.tie_embeddings) if role.trained else 0
        weights = trainer.weight_bytes * elements(role.stages)
        size += (weights + trainer.saved_state_bytes * trained) if role.saved else 0
        if optimizer.average_decay and role is roles[0]:
            size += 4 * trained + (0 if adapters else weights - trainer.weight_bytes * trained)
    return size
