"""Chooses the layout of a job without one (`layout=auto`), for its processes and their memory, before it begins.

On GPUs it is the first of the planner's search (`search.py`), by counted memory alone: a job cannot build the models of
other ranks. On CPUs it is the simplest: data parallelism, with experts spread over the processes.
"""

from __future__ import annotations

import os
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from grpo_mega.config.recorded import begun, recorded
from grpo_mega.config.rules import check_layout
from grpo_mega.config.schema import ClusterConfig, Config, LayoutConfig
from grpo_mega.config.schema.layout import DECIDED
from grpo_mega.config.trained_model import read_reward_model, read_teacher
from grpo_mega.errors import InputError
from grpo_mega.forecast.planning.advice import changes_that_fit
from grpo_mega.forecast.planning.hardware import GPUS
from grpo_mega.forecast.planning.hours import cache_room
from grpo_mega.forecast.planning.lines import in_gb
from grpo_mega.forecast.planning.plan import engine_of, gpus_of, plan
from grpo_mega.forecast.planning.search import (
    ANY_GPU,
    RECOMPUTE,
    Candidate,
    candidates,
    differing,
    is_allowed,
    job_for,
    limit_of,
    ranked,
    with_engine,
)
from grpo_mega.forecast.planning.show import as_words
from grpo_mega.forecast.planning.time import Assumed, generation_phase, hand_over_phases
from grpo_mega.platform import Platform
from grpo_mega.platform.collectives import from_all_ranks, from_main_rank

SHOWN = 8
"""Layouts that a search lists."""
NEAR = 0.05
"""Predictions that differ by less than this share of a step count as equal: they are not more exact
(docs/planner_published.py)."""
TRIED = 12
"""Most layouts that are built before a search gives up: the counted memory is nearly exact."""
OTHERWISE = "choose another with layout=NAME or layout.*"


@dataclass(frozen=True)
class Choice:
    """A chosen layout.

    Attributes:
        config: The run with it.
        why: The layout and the reason for it, in a line.
    """

    config: Config
    why: str


def propose(config: Config, assumed: Assumed | None = None) -> Config:
    """The configuration with the simplest layout of those that fit `config.cluster` and are nearly the fastest.

    Plans for one machine if the cluster gives no number. Replaces the sizes and the recomputation of `layout`,
    `optimizer.distributed` and `overlap`, the size of engines, and `layout.micro_batch_tokens` where smaller ones are
    needed. Call `platform.start_planning` first.

    Raises:
        InputError: The GPUs' memory is not given, or no layout fits.
    """
    assumed = assumed or Assumed()
    return _that_fit(config, assumed, ranked(config, assumed), built=True)[1]


def search(config: Config, assumed: Assumed) -> dict[str, Any]:
    """The layouts that fit, the proposed one first, and the fastest of all if that does not fit, as JSON.

    Raises:
        InputError: The GPUs' memory is not given, or no layout fits.
    """
    ranking, limit = ranked(config, assumed), limit_of(config.cluster)
    fitting, best = _that_fit(config, assumed, ranking, built=True)
    job = job_for(best)
    phases = hand_over_phases(job)
    if best.rollout.engine == "sglang":
        engine = engine_of(best, job.vocab_size, job.machines.gpus, job.roles)
        if generation := generation_phase(job, cache_room(job, engine), assumed):
            phases = [generation, *phases]
    return {
        "gpus": job.machines.gpus,
        "gpu": config.cluster.gpu or ANY_GPU,
        "limit": limit,
        "tried": len(ranking),
        "fit": len(fitting),
        "engines": {phase.name: phase.seconds for phase in phases},
        "settings": dict(differing(config, best)),
        "layouts": [_as_json(candidate, fitting[0]) for candidate in fitting[:SHOWN]],
        "faster": _as_json(ranking[0], fitting[0]) if ranking[0].bytes > limit else None,
    }


def _as_json(candidate: Candidate, first: Candidate) -> dict[str, Any]:
    """A candidate as JSON, with the parts of a step in which it is slower than the first."""
    parts = dict.fromkeys(part for each in (candidate, first) for phase in each.phases for part in phase.parts)
    differences = {part: _seconds_of(candidate, part) - _seconds_of(first, part) for part in parts}
    more = {part: more for part, more in sorted(differences.items(), key=lambda item: -item[1]) if more > 0}
    return {
        "layout": asdict(candidate.config.layout),
        "bytes": candidate.bytes,
        "seconds": candidate.seconds,
        "more": more if candidate.seconds > first.seconds else {},
    }


def _seconds_of(candidate: Candidate, part: str) -> float:
    return sum(phase.parts.get(part, 0.0) for phase in candidate.phases)


def choose_together(config: Config, platform: Platform, vocab_size: int) -> Choice:
    """The choice of a running job, the same on every rank; every rank must call it, after `join_processes`.

    The main rank chooses, for the smallest memory of all ranks' GPUs.

    Raises:
        InputError: On every rank: no layout can be used, or a teacher's files cannot be read.
    """
    processes = torch.distributed.get_world_size()
    machines = replace(config.cluster, nodes=1, gpus_per_node=processes, gpu_memory_mib=None)
    if platform.device.type == "cuda":
        memory = from_all_ranks(lambda: torch.cuda.get_device_properties(platform.device).total_memory)
        machines = _machines_here(config.cluster, processes, min(memory) >> 20)

    def choice() -> Choice | ValueError:
        try:
            return choose(config, vocab_size, machines)
        except ValueError as error:
            # Returned, not raised: the other ranks wait for an answer of the main rank, and raise this error with it.
            return error

    chosen = from_main_rank(choice)
    if isinstance(chosen, ValueError):
        raise chosen
    return chosen


def _machines_here(cluster: ClusterConfig, processes: int, memory_mib: int) -> ClusterConfig:
    """The machines of a running job on GPUs: as in `cluster`, with no more memory than these GPUs have."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    nodes = processes // here if processes % here == 0 else 1
    name = torch.cuda.get_device_name().lower()
    # Longest names first: "gb200" contains "b200".
    known = next((gpu for gpu in sorted(GPUS, key=len, reverse=True) if gpu in name), None)
    return replace(
        cluster,
        nodes=nodes,
        gpus_per_node=processes // nodes,
        gpu_memory_mib=min(memory_mib, cluster.gpu_memory_mib or memory_mib),
        gpu=cluster.gpu or known,
    )


def machines_ahead(cluster: ClusterConfig, processes: int | None = None) -> ClusterConfig:
    """The machines of a future job: for `processes` if given, else those of `cluster`, or one if that gives no number.

    Without the memory of a GPU they are CPUs, by default with one process.
    """
    if processes is None and cluster.nodes is None and cluster.gpu_memory_mib is None:
        processes = 1
    if processes is None:
        return replace(cluster, nodes=cluster.nodes or 1)
    each = cluster.gpus_per_node if processes % cluster.gpus_per_node == 0 else processes
    return replace(cluster, nodes=processes // each, gpus_per_node=each)


def choose(config: Config, vocab_size: int, machines: ClusterConfig) -> Choice:
    """The layout for the processes of these machines, one for each GPU. A run that resumes keeps its own.

    Reads nothing but the run's directory. On GPUs it also chooses `optimizer.distributed`, unless the run has begun
    without, `optimizer.overlap`, `rollout.sglang.tp`, and smaller `layout.micro_batch_tokens` where nothing else fits.

    Args:
        config: A configuration with an undecided layout.
        vocab_size: Rows of the model's vocabulary.
        machines: Machines with `nodes`; without `gpu_memory_mib` they are CPUs.

    Raises:
        InputError: No layout can be used; says what would come nearest.
    """
    run = config.run.root, config.run.name, config.run.fork
    before, any_before = begun(*run), recorded(*run)
    given = replace(config, cluster=machines, model=replace(config.model, vocab_size=vocab_size))
    processes = gpus_of(machines)
    if kept := _as_before(given, before):
        best, why = kept, "as the run has begun"
    elif machines.gpu_memory_mib is None:
        allowed = [candidate.layout for candidate in candidates(given, [given.layout.recompute])]
        if not allowed:
            raise _cannot_be_arranged(given)
        # It splits the model least, and its experts most.
        simplest = min(allowed, key=lambda layout: (splits(layout)[0], -layout.ep, splits(layout)))
        best, why = replace(given, layout=simplest), "the simplest on CPUs"
    else:
        # A run that began without the distributed optimizer goes on without it, even before its first checkpoint.
        best, why = _fastest(given, config.optimizer.distributed or not any_before)
    layout = best.layout if kept else replace(best.layout, chosen_for=processes)
    chosen = replace(config, layout=layout, optimizer=best.optimizer, rollout=best.rollout)
    check_layout(chosen, processes)
    words = _in_words(layout, given.layout, processes)
    if best.rollout.sglang.tp != given.rollout.sglang.tp:
        words += f", engines of {best.rollout.sglang.tp} GPUs"
    return Choice(chosen, f"layout=auto: {words}, {why}; {OTHERWISE}")


def _as_before(config: Config, before: dict[str, Any]) -> Config | None:
    """The configuration with the layout in which a run has begun; None for a new run.

    Also None if that layout was chosen for another number of processes, or was given and does not fit them.
    """
    written = before.get("layout") or {}
    layout = LayoutConfig(
        **{field.name: written[field.name] for field in fields(LayoutConfig) if field.name in written}
    )
    processes = gpus_of(config.cluster)
    if not written or layout.auto or layout.chosen_for not in (None, processes):
        return None
    kept = replace(config.layout, auto=False, chosen_for=layout.chosen_for)
    kept = replace(kept, **{name: getattr(layout, name) for name in DECIDED})
    optimizer, sglang = config.optimizer, config.rollout.sglang
    # With a chosen layout come the smaller micro-batches, the recomputation and the engines with which it fits.
    if layout.chosen_for:
        kept.micro_batch_tokens = max(config.model.context, min(kept.micro_batch_tokens, layout.micro_batch_tokens))
        kept.recompute = layout.recompute if kept.recompute == "none" else kept.recompute
        optimizer = replace(optimizer, overlap=before["optimizer"]["overlap"])
        sglang = replace(sglang, tp=before["rollout"]["sglang"]["tp"])
    resumed = replace(config, layout=kept, optimizer=optimizer, rollout=replace(config.rollout, sglang=sglang))
    teacher, reward_model = read_teacher(config.distill, config.model), read_reward_model(config.reward, config.model)
    return resumed if is_allowed(resumed, processes, teacher, reward_model) else None


def _fastest(config: Config, distributed: bool) -> tuple[Config, str]:
    """The configuration with the layout that `propose` would take by counted memory alone, with engines that fit; why.

    Raises:
        InputError: No layout fits.
    """
    recompute = RECOMPUTE if config.layout.recompute == "none" else [config.layout.recompute]
    fitting, best = _that_fit(config, Assumed(), ranked(config, Assumed(), recompute, distributed), built=False)
    fits = f"{in_gb(fitting[0].bytes)} of {in_gb(limit_of(config.cluster))} GB that may be planned"
    return best, f"the simplest of the predicted fastest of {len(fitting)} layouts that fit ({fits})"


def _that_fit(
    config: Config, assumed: Assumed, ranking: list[Candidate], built: bool
) -> tuple[list[Candidate], Config]:
    """The candidates that fit, and the first one's configuration with engines that fit as well.

    The first is the simplest of those that are nearly as fast as the fastest (`NEAR`): it recomputes nothing if it can,
    and splits the model least. The others follow by their seconds.

    Args:
        config: The configuration of which the candidates are variants.
        assumed: Lengths of prompts and completions.
        ranking: The candidates, see `ranked`.
        built: Whether candidates are also built and planned exactly.

    Raises:
        InputError: None fits; says what would come nearest.
    """
    limit, completed = limit_of(config.cluster), dict[int, Config | None]()

    def complete(candidate: Candidate) -> Config | None:
        # Building a candidate takes seconds, and the first one is asked for again below. Configurations cannot be
        # hashed, so identities are the keys; `ranking` keeps the candidates alive.
        if id(candidate) not in completed:
            fits = not built or plan(candidate.config)["fits"]
            completed[id(candidate)] = with_engine(candidate.config, assumed) if fits else None
        return completed[id(candidate)]

    fitting = [candidate for candidate in ranking if candidate.bytes <= limit]
    # The fastest that still fits when it is built, with engines that fit beside it.
    fastest = next((number for number, candidate in enumerate(fitting[:TRIED]) if complete(candidate)), None)
    if not ranking:
        raise _cannot_be_arranged(config)
    if fastest is None:
        raise _too_large(min(ranking, key=lambda candidate: candidate.bytes), limit)
    fitting = fitting[fastest:]
    # The simplest of those that are about as fast.
    near = [candidate for candidate in fitting if candidate.seconds <= (1 + NEAR) * fitting[0].seconds]
    near.sort(key=lambda each: (each.config.layout.recompute == "full", splits(each.config.layout)))
    # There is one: the fastest itself is among them.
    first = next(candidate for candidate in near if complete(candidate))
    best = complete(first)
    assert best is not None
    return [first, *(each for each in fitting if each is not first)], best


def splits(layout: LayoutConfig) -> tuple[int, int, int]:
    """Sort key: how much a layout splits model and sequences; for as many parts, tensor parallelism splits least."""
    return layout.tp * layout.pp * layout.cp, layout.pp * layout.cp, layout.pp


def _too_large(smallest: Candidate, limit: float) -> InputError:
    """The error that no layout fits, with what would come nearest."""
    # Changes are tried on the best case, with a distributed optimizer and the largest engines within a machine, which
    # need least of each GPU.
    config = deepcopy(smallest.config)
    config.optimizer.distributed = True
    if config.rollout.engine == "sglang":
        config.rollout.sglang.tp = max(config.rollout.sglang.tp, config.cluster.gpus_per_node)
    changes = [change["settings"] for change in changes_that_fit(config)]
    # A size of the layout would decide on all of its sizes, and the number of processes is not a setting of a job.
    words = [
        as_words(settings)
        for settings in changes
        if not any(name.startswith(("layout.", "cluster.")) for name in settings)
    ]
    if more := [settings["cluster.nodes"] for settings in changes if "cluster.nodes" in settings]:
        words.append(f"{min(more) * config.cluster.gpus_per_node} GPUs (cluster.nodes={min(more)})")
    why = f"the smallest takes about {in_gb(smallest.bytes)} GB of a GPU, of {in_gb(limit)} GB that may be planned"
    if smallest.bytes <= limit:
        why = "the trainer alone would, but leaves no room for engines of any size (rollout.sglang.tp)"
        if config.rollout.engine != "sglang":
            why = f"built, the smallest takes more of a GPU than the {in_gb(limit)} GB that may be planned"
    fix = f"try {', or '.join(words)}" if words else "start more processes, or lower model.context"
    return InputError(f"{gpus_of(config.cluster)} GPUs", f"no layout fits: {why}", fix)


def _cannot_be_arranged(config: Config) -> InputError:
    """The error for a number of processes that no layout divides: why data parallelism alone is refused."""
    processes = gpus_of(config.cluster)
    try:
        alone = replace(config.layout, auto=False)
        check_layout(replace(config, layout=alone, optimizer=replace(config.optimizer, overlap=False)), processes)
    except InputError as error:
        return error
    return InputError(
        f"{processes} processes", "no layout arranges them for this model", "start another number of processes"
    )


def _in_words(layout: LayoutConfig, before: LayoutConfig, processes: int) -> str:
    """A chosen layout, with its settings that differ from those before."""
    sizes = {"dp": processes // (layout.tp * layout.pp * layout.cp)}
    sizes |= {name: getattr(layout, name) for name in ("tp", "pp", "vpp", "cp", "ep", "etp")}
    parts = [" x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"]
    if layout.recompute != before.recompute:
        parts.append(f"recompute {layout.recompute}")
    if layout.micro_batch_tokens != before.micro_batch_tokens:
        parts.append(f"micro-batches of {layout.micro_batch_tokens:,} tokens")
    return ", ".join(parts)
