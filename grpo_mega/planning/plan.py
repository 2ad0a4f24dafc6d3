"""What a run will take on every GPU, before anybody queues: parameters and bytes of a rank of every pipeline stage."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from grpo_mega.config.rules import ConfigError, check_layout, fewest_processes
from grpo_mega.config.schema import Config
from grpo_mega.data.tokenizer import CharTokenizer
from grpo_mega.planning.inventory import Role, take_stock, total
from grpo_mega.planning.memory import MAY_BE_PLANNED, held, leaves, memory, optimizer_bytes, weight_bytes
from grpo_mega.rollout.sglang.memory import plan_engine


def plan(config: Config) -> dict[str, Any]:
    """What a run takes, in parameters and bytes, all of it JSON; call `platform.start_planning` first.

    Raises:
        ConfigError: The GPUs cannot be arranged in the layout, or nothing says how large the vocabulary is.
    """
    cluster, layout = config.cluster, config.layout
    gpus = cluster.nodes * cluster.gpus_per_node if cluster.nodes else fewest_processes(layout)
    counted = (
        f"cluster.nodes={cluster.nodes} * cluster.gpus_per_node={cluster.gpus_per_node} =" if cluster.nodes else ""
    )
    check_layout(config, gpus, counted or "the number of GPUs")
    vocab_size = _vocabulary(config)
    roles = roles_of(config, vocab_size, gpus)
    policy, numbers = roles[0], range(layout.pp)
    parameters, ahead = total(policy.stages)
    found = [memory(config, roles, number, vocab_size) for number in numbers]
    totals = [sum(lines.values()) for lines in found]
    capacity = cluster.gpu_memory_mib * 2**20 if cluster.gpu_memory_mib else None
    limit = MAY_BE_PLANNED * capacity if capacity else None
    return {
        "experiment": config.run.name,
        "parameters": parameters,
        "prediction_parameters": ahead,
        "gpus": gpus,
        "layout": asdict(layout) | {"dp": gpus // (layout.tp * layout.pp * layout.cp)},
        "stages": [{key: value for key, value in asdict(stage).items() if key != "whole"} for stage in policy.stages],
        "memory": found,
        "static": [sum(held(config, [policy], number).values()) for number in numbers],
        "total": totals,
        "checkpoint": checkpoint(config, roles),
        "host": min(gpus, cluster.gpus_per_node) * max(leaves(held(config, roles, number)) for number in numbers),
        "capacity": capacity,
        "limit": limit,
        "fits": max(totals) <= limit if limit else None,
        "engine": _engine(config, vocab_size, gpus, found) if config.rollout.engine == "sglang" else None,
    }


def _engine(config: Config, vocab_size: int, gpus: int, trainer: list[dict[str, float]]) -> dict[str, Any] | None:
    """The turn of an engine that shares the GPUs; None when nothing is known of them, or it has others."""
    mib, algorithm = config.cluster.gpu_memory_mib, config.algorithm
    if mib is None or config.rollout.sglang.first_gpu is not None:
        return None
    capacity = mib * 2**20
    found = plan_engine(config, vocab_size, max(lines["weights"] for lines in trainer), capacity)
    peak = sum(found["hand-over"].values())
    excess = sum(found["generation"].values()) - capacity  # SGLang fills a GPU, as far as it is told
    engines = gpus // config.rollout.sglang.tp
    return found | {
        "engines": engines,
        "samples": -(-algorithm.prompts_per_step // engines) * algorithm.group_size,
        "peak": peak,
        "excess": max(0.0, excess),
        "fits": peak <= MAY_BE_PLANNED * capacity and excess <= 0 and found["longest"] > 0,
    }


def roles_of(config: Config, vocab_size: int, gpus: int) -> list[Role]:
    """The models of a run, the policy first; with a KL term a frozen copy of it is another."""
    policy = Role("policy", True, True, take_stock(config.model, config.layout, vocab_size, gpus))
    reference = Role("reference policy", False, True, policy.stages)
    return [policy, *([reference] if config.algorithm.kl_coef else [])]


def checkpoint(config: Config, roles: list[Role]) -> int:
    """Bytes of a checkpoint: weights, and the state of Adam for what is trained."""
    weights, state = weight_bytes(config), optimizer_bytes(config)
    return sum(sum(total(role.stages)) * (weights + state * role.trained) for role in roles if role.saved)


def _vocabulary(config: Config) -> int:
    """A plan reads no files, so no tokenizer but the one built in."""
    if config.model.vocab_size is None and config.data.tokenizer != "chars":
        raise ConfigError(
            f"model.vocab_size is null, and a plan does not open data.tokenizer={config.data.tokenizer}; give "
            "model.vocab_size, as in the model's config.json"
        )
    return config.model.vocab_size or CharTokenizer().vocab_size
