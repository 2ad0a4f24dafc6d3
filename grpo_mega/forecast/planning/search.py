"""Layouts for a run on given machines, ranked by the predicted seconds of a step.

Every layout that the rules allow is tried: its memory and time follow from counted matrices (`take_stock`), in
milliseconds. `choice.py` takes one of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from grpo_mega.config.rules import check_config, check_layout
from grpo_mega.config.schema import ClusterConfig, Config, LayoutConfig, ModelConfig
from grpo_mega.config.trained_model import (
    TrainedModel,
    check_reward_model,
    check_teacher,
    read_reward_model,
    read_teacher,
)
from grpo_mega.errors import InputError
from grpo_mega.forecast.planning.hardware import machines_of
from grpo_mega.forecast.planning.hours import cache_room
from grpo_mega.forecast.planning.memory import MAY_BE_PLANNED, memory
from grpo_mega.forecast.planning.plan import engine_of, gpus_of, planned_vocabulary, roles_of
from grpo_mega.forecast.planning.time import (
    Assumed,
    Job,
    Phase,
    beside,
    generation_phase,
    hand_over_phases,
    trainer_phases,
)
from grpo_mega.models.megatron.adam import is_lean

SIZES = (1, 2, 4, 8, 16, 32, 64)
RECOMPUTE = ("none", "full")
ANY_GPU = "h100"
"""GPU whose data sheet ranks layouts when `cluster.gpu` is null."""


@dataclass(frozen=True)
class Candidate:
    """A layout that can run.

    Attributes:
        config: The run with it, and with the largest micro-batches that fit: `layout.micro_batch_tokens`, halved until
            they do, down to one sequence.
        bytes: Bytes of the fullest GPU during training, as counted.
        phases: Phases of a step: generation, as far as the step waits for it, and those of the trainer.
    """

    config: Config
    bytes: float
    phases: list[Phase]

    @property
    def seconds(self) -> float:
        """Seconds of a step without the hand-over of weights and GPUs, which hardly depends on the layout."""
        return sum(phase.seconds for phase in self.phases)


def job_for(config: Config) -> Job:
    """The run on the GPUs of `cluster.*`, of the kind `ANY_GPU` if that names none, with counted models."""
    cluster = replace(config.cluster, gpu=config.cluster.gpu or ANY_GPU)
    machines = machines_of(cluster, gpus_of(cluster))
    assert machines is not None  # a GPU is named
    vocab_size = planned_vocabulary(config.model, config.data)
    return Job(config, roles_of(config, vocab_size, machines.gpus, counted=True), vocab_size, machines)


def ranked(
    config: Config, assumed: Assumed, recompute: Sequence[str] = RECOMPUTE, distributed: bool | None = None
) -> list[Candidate]:
    """Every layout that the rules allow for this model on these GPUs, the fastest first, whether it fits or not.

    Engines are taken as set, with room for all that they generate. See `candidates` for `recompute` and `distributed`.

    Raises:
        InputError: The GPUs' memory is not given.
    """
    limit = limit_of(config.cluster)
    rollout = config.rollout
    longest = rollout.longer_max_new_tokens or rollout.max_new_tokens
    _, completions = assumed.completions(config.algorithm, rollout, longest)
    # Generation is simulated once, or once per split of the model for the embedded engine, which has the trainer's.
    generation: dict[tuple[int, ...], Phase | None] = {}
    ranking = []
    for candidate in candidates(config, recompute, distributed):
        job, layout = job_for(candidate), candidate.layout
        # Without a break the smallest is ranked, too: a search tells which layout would be faster if it fitted.
        for batches in smaller_batches(layout, candidate.model.context):
            smaller = replace(candidate, layout=batches)
            lines = (memory(smaller, [*job.roles], number, job.vocab_size) for number in range(layout.pp))
            size = max(sum(of_stage.values()) for of_stage in lines)
            if size <= limit:
                break
        split = (layout.tp, layout.pp, layout.cp, layout.ep) if rollout.engine == "embedded" else ()
        if split not in generation:
            generation[split] = generation_phase(job, math.inf, assumed)
        phases = trainer_phases(replace(job, config=smaller), completions, assumed.prompt)
        generated = generation[split]
        first = [beside(generated, phases, rollout)] if generated else []
        ranking.append(Candidate(smaller, size, [*first, *phases]))
    # Where generation ahead hides all of the training, the shortest training is still the best.
    return sorted(ranking, key=lambda each: (round(each.seconds, 6), sum(p.seconds for p in each.phases[1:])))


def smaller_batches(layout: LayoutConfig, context: int) -> Iterator[LayoutConfig]:
    """The layout, then with micro-batches halved again and again, down to one sequence of `context` tokens."""
    tokens = layout.micro_batch_tokens
    while True:
        yield replace(layout, micro_batch_tokens=tokens)
        if tokens <= context:
            return
        tokens = max(context, tokens // 2)


def candidates(
    config: Config, recompute: Sequence[str] = RECOMPUTE, distributed: bool | None = None
) -> Iterator[Config]:
    """The configuration with each layout that the rules allow for this model on these GPUs.

    Each has one kind of `recompute`. `optimizer.distributed` is `distributed`, or with None true wherever several
    replicas can share the optimizer's state.
    """
    config = replace(config, cluster=replace(config.cluster, nodes=config.cluster.nodes or 1))
    teacher, reward_model = read_teacher(config.distill, config.model), read_reward_model(config.reward, config.model)
    gpus = gpus_of(config.cluster)
    experts = config.model.moe.experts or (teacher is not None and teacher.model.moe.experts)
    # Tensor parallelism communicates several times in every layer, so only sizes within a machine are tried.
    inside = [size for size in SIZES if size <= config.cluster.gpus_per_node]
    for tp, pp, cp, ep, kind in product(inside, SIZES, SIZES, SIZES if experts else [1], recompute):
        if gpus % (tp * pp * cp) or gpus // pp % ep:
            continue
        # Where layers do not divide evenly, every stage but the last one gets one more.
        last = config.model.layers - (pp - 1) * -(-config.model.layers // pp)
        if last < 1:
            continue
        uneven = last if config.model.layers % pp else None
        layout = replace(
            config.layout, auto=False, tp=tp, pp=pp, cp=cp, ep=ep, sp=tp > 1, recompute=kind, vpp=1, etp=1,
            first_stage_layers=None, last_stage_layers=uneven,
        )  # fmt: skip
        # Context parallel ranks hold the same weights, and share the optimizer's state like replicas.
        several = gpus > tp * pp
        # A state in bf16 or on the host works only with the distributed optimizer, whatever is asked for.
        shared = (several if distributed is None else distributed) or is_lean(config.optimizer.state)
        candidate = replace(config, layout=layout)
        candidate.optimizer = replace(config.optimizer, distributed=shared, overlap=several)
        if is_allowed(candidate, gpus, teacher, reward_model):
            yield candidate


def is_allowed(config: Config, gpus: int, teacher: TrainedModel | None, reward_model: ModelConfig | None) -> bool:
    """Whether the rules allow a run on so many GPUs, and its layout can split teacher and reward model."""
    try:
        check_config(config)
        check_layout(config, gpus)
        if teacher:
            check_teacher(config, teacher)
        if reward_model:
            check_reward_model(config, reward_model)
    except InputError:
        return False
    return True


def with_engine(config: Config, assumed: Assumed) -> Config | None:
    """The configuration with the engines that fit and generate fastest; None when none fits.

    Engines larger than a machine are tried only if the run has them already.
    """
    if config.rollout.engine != "sglang":
        return config
    sglang, gpus = config.rollout.sglang, gpus_of(config.cluster)
    fitting = []
    for size in {sglang.tp, *(size for size in SIZES if size <= config.cluster.gpus_per_node)}:
        other = replace(config, rollout=replace(config.rollout, sglang=replace(sglang, tp=size)))
        if gpus % size:
            continue
        try:
            check_config(other)
        except InputError:
            continue
        job = job_for(other)
        engine = engine_of(other, job.vocab_size, gpus, job.roles)
        generation = generation_phase(job, cache_room(job, engine), assumed)
        if generation is None or (engine is not None and not engine["fits"]):
            continue
        phases = [generation, *hand_over_phases(job)]
        fitting.append((sum(phase.seconds for phase in phases), size, other))
    # Of equally fast engines the smallest; configurations themselves cannot be compared.
    return min(fitting, key=lambda each: each[:2])[2] if fitting else None


def limit_of(cluster: ClusterConfig) -> float:
    """Bytes of a GPU that may be planned. Raises InputError when its memory is not given."""
    if cluster.gpu_memory_mib is None:
        raise InputError(
            "cluster.gpu_memory_mib=null", "a layout must fit the memory of a GPU", "set it, or choose cluster=h100"
        )
    return MAY_BE_PLANNED * cluster.gpu_memory_mib * 2**20


def differing(config: Config, other: Config) -> list[tuple[str, Any]]:
    """(dotted name, value) of each setting in which the `other` configuration differs."""

    def leaves(node: Any, name: str) -> Iterator[tuple[str, Any]]:
        if isinstance(node, dict):
            for key, child in node.items():
                yield from leaves(child, f"{name}.{key}".lstrip("."))
        else:
            yield name, node

    before = dict(leaves(asdict(config), ""))
    return [(name, value) for name, value in leaves(asdict(other), "") if before.get(name) != value]
