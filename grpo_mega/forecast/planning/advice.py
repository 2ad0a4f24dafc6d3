"""Changes that make a run fit: single settings, those that cost the least time first."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from grpo_mega.config.schema import Config
from grpo_mega.config.trained_model import read_reward_model, read_teacher
from grpo_mega.forecast.planning.memory import MAY_BE_PLANNED, memory
from grpo_mega.forecast.planning.plan import engine_of, gpus_of, planned_vocabulary, roles_of
from grpo_mega.forecast.planning.search import is_allowed


def changes_that_fit(config: Config) -> list[dict[str, Any]]:
    """Changes of one setting, with those that it requires, that make the run fit on its machines or on more.

    Memory is counted from matrices (`take_stock`), so a change on the edge may turn out not to fit when it is planned.
    As JSON: [{"settings": {name: value}, "bytes": of the fullest GPU}], those that need no more GPUs first.
    """
    fitting: list[dict[str, Any]] = []
    teacher, reward_model = read_teacher(config.distill, config.model), read_reward_model(config.reward, config.model)
    for settings in _changes(config):
        other = deepcopy(config)
        for name, value in settings.items():
            *path, field = name.split(".")
            part: Any = other
            for step in path:
                part = getattr(part, step)
            setattr(part, field, value)
        gpus = gpus_of(other.cluster)
        if is_allowed(other, gpus, teacher, reward_model) and (size := _fitting(other, gpus)) is not None:
            fitting.append({"settings": settings, "bytes": size})
    return fitting


def _changes(config: Config) -> Iterator[dict[str, Any]]:
    """Changes that lower the memory of a GPU, the cheapest first."""
    layout, cluster, engine = config.layout, config.cluster, config.rollout.sglang.tp
    least = config.model.context
    if not config.optimizer.distributed:
        yield {"optimizer.distributed": True}
    # A state on the host or in bf16 works only with the distributed optimizer.
    state: dict[str, Any] = {} if config.optimizer.distributed else {"optimizer.distributed": True}
    if layout.recompute != "full":
        yield {"layout.recompute": "full"}
    if layout.micro_batch_tokens > least:
        yield {"layout.micro_batch_tokens": max(least, layout.micro_batch_tokens // 2)}
    if not config.optimizer.state.on_host:
        yield state | {"optimizer.state.on_host": True}
        # After on_host, although it costs no time: it changes the numbers of training.
        if config.optimizer.state.moments == "fp32":
            yield state | {"optimizer.state.moments": "bf16"}
    if config.rollout.engine == "sglang":
        yield {"rollout.sglang.tp": 2 * engine}
        yield {"rollout.sglang.tp": 4 * engine}
    if config.model.moe.experts:
        yield {"layout.ep": 2 * layout.ep}
        yield {"layout.ep": 4 * layout.ep}
    yield {"layout.tp": 2 * layout.tp, "layout.sp": True}
    yield {"layout.cp": 2 * layout.cp}
    yield {"layout.pp": 2 * layout.pp, "layout.first_stage_layers": None, "layout.last_stage_layers": None}
    for times in (2, 4):
        nodes = times * (cluster.nodes or 1)
        yield {"cluster.nodes": nodes}
        if config.model.moe.experts:
            yield {"cluster.nodes": nodes, "layout.ep": times * layout.ep}
        yield {"cluster.nodes": nodes, "layout.tp": 2 * layout.tp, "layout.sp": True}


def _fitting(config: Config, gpus: int) -> float | None:
    """Bytes of the fullest GPU if trainer and engines fit, else None."""
    vocab_size = planned_vocabulary(config.model, config.data)
    roles = roles_of(config, vocab_size, gpus, counted=True)
    size = max(sum(memory(config, roles, number, vocab_size).values()) for number in range(config.layout.pp))
    mib = config.cluster.gpu_memory_mib
    if mib is None or size > MAY_BE_PLANNED * mib * 2**20:
        return None
    engine = engine_of(config, vocab_size, gpus, roles)
    return size if engine is None or engine["fits"] else None
