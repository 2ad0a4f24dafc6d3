"""Layouts for a run on the machines that it is meant for, ranked by the seconds that a step should take.

Every layout that the rules allow is tried: its memory and its time follow from counted matrices (`shares.py`), in
milliseconds. `choice.py` takes one of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from grpo_mega.config.reward_model import check_reward_model, read_reward_model
from grpo_mega.config.rules import ConfigError, check_config, check_layout
from grpo_mega.config.schema import REWARD_MODELS, Config, LoRAConfig, ModelConfig
from grpo_mega.config.teacher import check_teacher, read_teacher
from grpo_mega.config.trained_model import TrainedModel
from grpo_mega.forecast.planning.hardware import Machines, machines_of
from grpo_mega.forecast.planning.hours import cache_room
from grpo_mega.forecast.planning.inventory import Role
from grpo_mega.forecast.planning.memory import MAY_BE_PLANNED, memory
from grpo_mega.forecast.planning.plan import engine_of, roles_beside, vocabulary, with_reward_model
from grpo_mega.forecast.planning.shares import shared_out
from grpo_mega.forecast.planning.time import Assumed, Phase, generation_phase, hand_over_phases, trainer_phases
from grpo_mega.models.megatron.adam import is_lean

SIZES = (1, 2, 4, 8, 16, 32, 64)
RECOMPUTE = ("none", "full")
ANY_GPU = "h100"
"""Whose data sheet ranks layouts when `cluster.gpu` is null."""


@dataclass(frozen=True)
class Candidate:
    """A layout that can run.

    Attributes:
        config: The run with it, and with the largest micro-batches that fit: `layout.micro_batch_tokens`, or that
            halved until they do, down to a sequence.
        bytes: Of the fullest GPU while training, as counted.
        phases: A step's phases: generation, and those of the trainer.
    """

    config: Config
    bytes: float
    phases: list[Phase]

    @property
    def seconds(self) -> float:
        """Seconds of a step, without the hand-over of weights and GPUs, which hardly depends on the layout."""
        return sum(phase.seconds for phase in self.phases)


def ranked(
    config: Config, assumed: Assumed, recompute: Sequence[str] = RECOMPUTE, distributed: bool | None = None
) -> list[Candidate]:
    """Every layout that the rules allow for this model on these GPUs, the fastest first, whether it fits or not.

    Engines are taken as they are set, with room for all that they generate. `recompute` and `distributed` are those of
    `candidates`.

    Raises:
        ConfigError: The GPUs' memory is not given.
    """
    limit, machines, vocab_size = limit_of(config), machines_for(config), vocabulary(config)
    _, answers = assumed.answers(config, config.rollout.longer_max_new_tokens or config.rollout.max_new_tokens)
    generation: dict[tuple[int, ...], Phase | None] = {}  # the embedded engine works in the trainer's layout
    found = []
    for candidate in candidates(config, recompute, distributed):
        roles, layout = roles_about(candidate, machines.gpus), candidate.layout
        for smaller in smaller_batches(candidate):
            size = max(sum(memory(smaller, roles, number, vocab_size).values()) for number in range(layout.pp))
            if size <= limit:
                break
        sizes = (layout.tp, layout.pp, layout.cp, layout.ep) if config.rollout.engine == "embedded" else ()
        if sizes not in generation:
            generation[sizes] = generation_phase(candidate, vocab_size, machines, math.inf, assumed)
        phases = trainer_phases(smaller, roles, machines, answers, assumed.prompt)
        found.append(Candidate(smaller, size, [phase for phase in (generation[sizes], *phases) if phase]))
    return sorted(found, key=lambda candidate: candidate.seconds)


def smaller_batches(config: Config) -> Iterator[Config]:
    """The configuration, and with micro-batches of half as many tokens each, down to a sequence."""
    tokens, least = config.layout.micro_batch_tokens, config.model.context
    while True:
        yield replace(config, layout=replace(config.layout, micro_batch_tokens=tokens))
        if tokens <= least:
            return
        tokens = max(least, tokens // 2)


def candidates(
    config: Config, recompute: Sequence[str] = RECOMPUTE, distributed: bool | None = None
) -> Iterator[Config]:
    """The configuration with each layout that the rules allow for this model on these GPUs.

    Each has one kind of `recompute`, and `optimizer.distributed` as given, with None where several replicas share the
    optimizer's state.
    """
    config = replace(config, cluster=replace(config.cluster, nodes=config.cluster.nodes or 1))
    teacher, preferred = read_teacher(config), read_reward_model(config)
    gpus = _gpus(config)
    experts = config.model.moe.experts or (teacher is not None and teacher.model.moe.experts)
    inside = [size for size in SIZES if size <= config.cluster.gpus_per_node]
    for tp, pp, cp, ep, kind in product(inside, SIZES, SIZES, SIZES if experts else [1], recompute):
        if gpus % (tp * pp * cp) or gpus // pp % ep:
            continue
        last = config.model.layers - (pp - 1) * -(-config.model.layers // pp)
        if last < 1:
            continue
        uneven = last if config.model.layers % pp else None
        layout = replace(
            config.layout, auto=False, tp=tp, pp=pp, cp=cp, ep=ep, sp=tp > 1, recompute=kind, vpp=1, etp=1,
            first_stage_layers=None, last_stage_layers=uneven,
        )  # fmt: skip
        several = gpus > tp * pp  # replicas
        shared = several if distributed is None else distributed
        candidate = replace(config, layout=layout)
        needed = shared or is_lean(config.optimizer.state)
        candidate.optimizer = replace(config.optimizer, distributed=needed, overlap=several)
        if is_allowed(candidate, gpus, teacher, preferred):
            yield candidate


def is_allowed(config: Config, gpus: int, teacher: TrainedModel | None, reward_model: ModelConfig | None) -> bool:
    """Whether the rules allow a run on so many GPUs, and its layout splits the models beside the policy."""
    try:
        check_config(config)
        check_layout(config, gpus)
        if teacher:
            check_teacher(config, teacher)
        if reward_model:
            check_reward_model(config, reward_model)
    except ConfigError:
        return False
    return True


def roles_about(config: Config, gpus: int) -> list[Role]:
    """The models of a run as `plan.roles_of` has them, their stages counted and not built; frozen parts count as
    trained."""
    vocab_size = vocabulary(config)
    whole = replace(config, lora=LoRAConfig())
    if config.run.trains in REWARD_MODELS:
        return [Role("reward model", True, True, shared_out(whole, vocab_size, gpus, scalar=True))]
    teacher = None
    if taught := read_teacher(config):
        stages = shared_out(replace(whole, model=taught.model), taught.model.vocab_size or vocab_size, gpus)
        teacher = Role("teacher", False, False, stages, taught.model)
    scalar = shared_out(whole, vocab_size, gpus, scalar=True)
    roles = roles_beside(config, shared_out(config, vocab_size, gpus), scalar, teacher)
    preferred = read_reward_model(config)
    if preferred is None:
        return roles
    own = shared_out(replace(whole, model=preferred), preferred.vocab_size or vocab_size, gpus, scalar=True)
    return with_reward_model(roles, own, preferred)


def with_engine(config: Config, assumed: Assumed) -> Config | None:
    """The configuration with the engines that fit and generate fastest; None when none do.

    Larger ones than a machine are tried only if the run has them already.
    """
    if config.rollout.engine != "sglang":
        return config
    machines, vocab_size, own = machines_for(config), vocabulary(config), config.rollout.sglang.tp
    found = []
    for size in {own, *(size for size in SIZES if size <= config.cluster.gpus_per_node)}:
        other = deepcopy(config)
        other.rollout.sglang.tp = size
        if machines.gpus % size or not _valid(other):
            continue
        roles = roles_about(other, machines.gpus)
        engine = engine_of(other, vocab_size, machines.gpus, roles)
        phase = generation_phase(other, vocab_size, machines, engine_room(other), assumed)
        if phase is None or (engine is not None and not engine["fits"]):
            continue
        pushed = hand_over_phases(other, vocab_size, machines, roles)
        found.append((phase.seconds + sum(each.seconds for each in pushed), size, other))
    return min(found, key=lambda each: each[:2])[2] if found else None


def limit_of(config: Config) -> float:
    """Bytes of a GPU that may be planned. Raises ConfigError when its memory is not given."""
    if config.cluster.gpu_memory_mib is None:
        raise ConfigError("cluster.gpu_memory_mib is not set, and a layout is to fit it; give it, or cluster=h100")
    return MAY_BE_PLANNED * config.cluster.gpu_memory_mib * 2**20


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


def _valid(config: Config) -> bool:
    try:
        check_config(config)
    except ConfigError:
        return False
    return True


def engine_room(config: Config) -> float:
    """Tokens that the caches of an engine hold."""
    vocab_size, gpus = vocabulary(config), _gpus(config)
    engine = (
        engine_of(config, vocab_size, gpus, roles_about(config, gpus)) if config.rollout.engine == "sglang" else None
    )
    mib = config.cluster.gpu_memory_mib
    return cache_room(config, {"engine": engine, "capacity": mib * 2**20 if mib else None}, vocab_size)


def machines_for(config: Config) -> Machines:
    """The machines that a search is for: `cluster.gpu`, or `ANY_GPU` where that is null."""
    cluster = replace(config.cluster, gpu=config.cluster.gpu or ANY_GPU)
    found = machines_of(cluster, _gpus(config))
    assert found is not None  # a GPU is named
    return found


def _gpus(config: Config) -> int:
    return (config.cluster.nodes or 1) * config.cluster.gpus_per_node
