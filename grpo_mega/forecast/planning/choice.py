"""The layout of a job that is given none (`layout=auto`), chosen for its processes and their memory before it begins.

On GPUs it is the first of the planner's search (`search.py`), by counted memory alone, for a job cannot build models
that are not its own. On CPUs it is the simplest: data parallelism, with experts spread over the processes.
"""

from __future__ import annotations

import os
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from grpo_mega.config.recorded import begun, recorded
from grpo_mega.config.reward_model import read_reward_model
from grpo_mega.config.rules import ConfigError, check_layout
from grpo_mega.config.schema import ClusterConfig, Config, LayoutConfig
from grpo_mega.config.schema.layout import DECIDED
from grpo_mega.config.teacher import read_teacher
from grpo_mega.forecast.planning.advice import changes_that_fit
from grpo_mega.forecast.planning.hardware import GPUS
from grpo_mega.forecast.planning.plan import plan, vocabulary
from grpo_mega.forecast.planning.search import (
    ANY_GPU,
    RECOMPUTE,
    Candidate,
    candidates,
    differing,
    engine_room,
    is_allowed,
    limit_of,
    machines_for,
    ranked,
    roles_about,
    with_engine,
)
from grpo_mega.forecast.planning.show import as_words
from grpo_mega.forecast.planning.time import Assumed, generation_phase, hand_over_phases
from grpo_mega.forecast.planning.verdict import in_gb
from grpo_mega.platform import Platform
from grpo_mega.platform.collectives import from_all_ranks, from_main_rank

SHOWN = 8
"""Layouts that a search lists."""
NEAR = 0.05
"""Share of a step by which two predictions may differ and are taken for equal: they are not that exact
(`published.py`)."""
TRIED = 12
"""Layouts at most that are built before a search gives up: the counted memory is nearly exact."""
OTHERWISE = "layout=NAME or layout.* takes another"


@dataclass(frozen=True)
class Choice:
    """A chosen layout.

    Attributes:
        config: The run with it.
        why: What was chosen and why, in a line.
    """

    config: Config
    why: str


def propose(config: Config, assumed: Assumed | None = None) -> Config:
    """The configuration with a layout that fits `config.cluster`, one machine if it gives no number: the simplest of
    those that are predicted to be nearly the fastest.

    Replaces the sizes and the recomputation of `layout`, `optimizer.distributed` and `overlap`, the size of engines,
    and `layout.micro_batch_tokens` where smaller ones are needed. Call `platform.start_planning` first.

    Raises:
        ConfigError: The GPUs' memory is not given, or no layout fits.
    """
    assumed = assumed or Assumed()
    return _that_fit(config, assumed, ranked(config, assumed), built=True)[1]


def search(config: Config, assumed: Assumed) -> dict[str, Any]:
    """The layouts that fit, the proposed one first, and the fastest of all where that does not, as JSON.

    Raises:
        ConfigError: The GPUs' memory is not given, or no layout fits.
    """
    found = ranked(config, assumed)
    fitting, best = _that_fit(config, assumed, found, built=True)
    machines = machines_for(config)
    engines = hand_over_phases(best, vocabulary(best), machines, roles_about(best, machines.gpus))
    if best.rollout.engine == "sglang" and (
        generation := generation_phase(best, vocabulary(best), machines, engine_room(best), assumed)
    ):
        engines = [generation, *engines]
    return {
        "gpus": machines.gpus,
        "gpu": config.cluster.gpu or ANY_GPU,
        "limit": limit_of(config),
        "tried": len(found),
        "fit": len(fitting),
        "engines": {phase.name: phase.seconds for phase in engines},
        "settings": dict(differing(config, best)),
        "layouts": [_told(candidate, fitting[0]) for candidate in fitting[:SHOWN]],
        "faster": _told(found[0], fitting[0]) if found[0].bytes > limit_of(config) else None,
    }


def _told(candidate: Candidate, first: Candidate) -> dict[str, Any]:
    """A candidate as JSON, and what makes it slower than the first."""
    names = dict.fromkeys(name for each in (candidate, first) for phase in each.phases for name in phase.parts)
    differences = {name: _seconds_of(candidate, name) - _seconds_of(first, name) for name in names}
    more = {name: more for name, more in sorted(differences.items(), key=lambda item: -item[1]) if more > 0}
    return {
        "layout": asdict(candidate.config.layout),
        "bytes": candidate.bytes,
        "seconds": candidate.seconds,
        "more": more if candidate.seconds > first.seconds else {},
    }


def _seconds_of(candidate: Candidate, part: str) -> float:
    return sum(phase.parts.get(part, 0.0) for phase in candidate.phases)


def choose_together(config: Config, platform: Platform, vocab_size: int) -> Choice:
    """The choice of a job, the same on every rank; every rank calls it, after `join_processes`.

    The main rank chooses, for the smallest memory of all ranks' GPUs.

    Raises:
        ConfigError: On every rank. No layout can be used, or a teacher's files cannot be read.
    """
    processes = torch.distributed.get_world_size()
    machines = replace(config.cluster, nodes=1, gpus_per_node=processes, gpu_memory_mib=None)
    if platform.device.type == "cuda":
        of_all = from_all_ranks(lambda: torch.cuda.get_device_properties(platform.device).total_memory)
        machines = _machines_here(config.cluster, processes, min(of_all) >> 20)

    def choice() -> Choice | list[str]:
        try:
            return choose(config, vocab_size, machines)
        except ValueError as error:  # of a teacher's files, too
            return getattr(error, "problems", [str(error)])

    chosen = from_main_rank(choice)
    if not isinstance(chosen, Choice):
        raise ConfigError("\n".join(chosen), chosen)
    return chosen


def _machines_here(cluster: ClusterConfig, processes: int, memory_mib: int) -> ClusterConfig:
    """The machines of a job on GPUs: what `cluster` says of them, and no more memory than there is."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    nodes = processes // here if processes % here == 0 else 1
    name = torch.cuda.get_device_name().lower()
    known = next((gpu for gpu in sorted(GPUS, key=len, reverse=True) if gpu in name), None)
    return replace(
        cluster,
        nodes=nodes,
        gpus_per_node=processes // nodes,
        gpu_memory_mib=min(memory_mib, cluster.gpu_memory_mib or memory_mib),
        gpu=cluster.gpu or known,
    )


def machines_ahead(cluster: ClusterConfig, processes: int | None = None) -> ClusterConfig:
    """The machines of a job that is not started yet: those of so many processes, else of `cluster`, one if that gives
    no number. Without the memory of a GPU they are CPUs, of one process unless it says how many."""
    if processes is None and cluster.nodes is None and _on_cpus(cluster):
        processes = 1
    if processes is None:
        return replace(cluster, nodes=cluster.nodes or 1)
    each = cluster.gpus_per_node if processes % cluster.gpus_per_node == 0 else processes
    return replace(cluster, nodes=processes // each, gpus_per_node=each)


def _on_cpus(machines: ClusterConfig) -> bool:
    return machines.gpu_memory_mib is None


def choose(config: Config, vocab_size: int, machines: ClusterConfig) -> Choice:
    """The layout for the processes of these machines, one for each GPU; a pure function, apart from the run's own
    directory, where a run that goes on finds what it had.

    For GPUs it comes with `optimizer.distributed`, unless the run has begun without, `optimizer.overlap`,
    `rollout.sglang.tp`, and smaller `layout.micro_batch_tokens` where nothing else fits.

    Args:
        config: A configuration whose layout is undecided.
        vocab_size: Rows that the model's vocabulary needs.
        machines: `nodes` is given; without `gpu_memory_mib` they are CPUs.

    Raises:
        ConfigError: No layout can be used; says what comes nearest.
    """
    run = config.run.root, config.run.name, config.run.fork
    before, any_before = begun(*run), recorded(*run)
    given = replace(config, cluster=machines, model=replace(config.model, vocab_size=vocab_size))
    processes = _processes(given)
    if kept := _as_before(given, before):
        found, why = kept, "as the run has begun"
    elif _on_cpus(machines):
        found, why = _simplest(given)
    else:
        found, why = _fastest(given, config.optimizer.distributed or not any_before)
    layout = found.layout if kept else replace(found.layout, chosen_for=processes)
    chosen = replace(config, layout=layout, optimizer=found.optimizer, rollout=found.rollout)
    check_layout(chosen, processes)
    return Choice(chosen, f"layout=auto: {_in_words(chosen, given)}, {why}; {OTHERWISE}")


def _as_before(config: Config, before: dict[str, Any]) -> Config | None:
    """The configuration with the layout in which a run has begun, if that was chosen for as many processes, or given
    and fits them; None otherwise, and for a run that begins."""
    said = before.get("layout") or {}
    layout = LayoutConfig(**{field.name: said[field.name] for field in fields(LayoutConfig) if field.name in said})
    if not said or layout.auto or layout.chosen_for not in (None, _processes(config)):
        return None
    kept = replace(config.layout, auto=False, chosen_for=layout.chosen_for)
    kept = replace(kept, **{name: getattr(layout, name) for name in DECIDED})
    optimizer, sglang = config.optimizer, config.rollout.sglang
    if layout.chosen_for:
        kept.micro_batch_tokens = max(config.model.context, min(kept.micro_batch_tokens, layout.micro_batch_tokens))
        kept.recompute = layout.recompute if kept.recompute == "none" else kept.recompute
        optimizer = replace(optimizer, overlap=before["optimizer"]["overlap"])
        sglang = replace(sglang, tp=before["rollout"]["sglang"]["tp"])
    found = replace(config, layout=kept, optimizer=optimizer, rollout=replace(config.rollout, sglang=sglang))
    return found if is_allowed(found, _processes(config), read_teacher(config), read_reward_model(config)) else None


def _simplest(config: Config) -> tuple[Config, str]:
    """The layout that splits the model least, and its experts most; and why. Raises ConfigError when there is none."""
    allowed = [found.layout for found in candidates(config, [config.layout.recompute])]
    if not allowed:
        raise _cannot_be_arranged(config)
    least = min(allowed, key=lambda layout: (splits(layout)[0], -layout.ep, splits(layout)))
    return replace(config, layout=least), "the simplest on CPUs"


def _fastest(config: Config, distributed: bool) -> tuple[Config, str]:
    """The layout that `propose` would take, though by counted memory alone, with engines that fit; and why.

    Raises:
        ConfigError: None fits.
    """
    recompute = RECOMPUTE if config.layout.recompute == "none" else [config.layout.recompute]
    fitting, best = _that_fit(config, Assumed(), ranked(config, Assumed(), recompute, distributed), built=False)
    fits = f"{in_gb(fitting[0].bytes)} of {in_gb(limit_of(config))} GB that may be planned"
    return best, f"simplest of the predicted fastest of {len(fitting)} layouts that fit ({fits})"


def _that_fit(config: Config, assumed: Assumed, found: list[Candidate], built: bool) -> tuple[list[Candidate], Config]:
    """The candidates that fit, and the first one's configuration with engines that fit as well.

    The first is the simplest of those that are nearly as fast as the fastest (`NEAR`): it recomputes nothing if it can,
    and splits the model least. The others follow by their seconds.

    Args:
        config: The configuration that the candidates are of.
        assumed: How long prompts and answers are.
        found: The candidates, see `ranked`.
        built: Whether a candidate is built and planned exactly before it is believed.

    Raises:
        ConfigError: None fits; says what comes nearest.
    """

    limit, tried = limit_of(config), dict[int, Config | None]()

    def complete(candidate: Candidate) -> Config | None:
        if id(candidate) not in tried:
            fits = not built or plan(candidate.config)["fits"]
            tried[id(candidate)] = with_engine(candidate.config, assumed) if fits else None
        return tried[id(candidate)]

    fitting = [candidate for candidate in found if candidate.bytes <= limit]
    fastest = next((number for number, candidate in enumerate(fitting[:TRIED]) if complete(candidate)), None)
    if not found:
        raise _cannot_be_arranged(config)
    if fastest is None:
        raise ConfigError(_too_large(min(found, key=lambda candidate: candidate.bytes), limit))
    fitting = fitting[fastest:]
    near = [candidate for candidate in fitting if candidate.seconds <= (1 + NEAR) * fitting[0].seconds]
    near.sort(key=lambda each: (each.config.layout.recompute == "full", splits(each.config.layout)))
    first = next(candidate for candidate in near if complete(candidate))  # the fastest is among them
    best = complete(first)
    assert best is not None
    return [first, *(each for each in fitting if each is not first)], best


def splits(layout: LayoutConfig) -> tuple[int, int, int]:
    """How much a layout splits the model and its sequences; of the same number of parts, tensor parallelism is the
    simplest."""
    return layout.tp * layout.pp * layout.cp, layout.pp * layout.cp, layout.pp


def _too_large(smallest: Candidate, limit: float) -> str:
    """Message that nothing fits, with what comes nearest."""
    config = deepcopy(smallest.config)
    config.optimizer.distributed = True
    if config.rollout.engine == "sglang":  # engines of a machine take the least of a GPU
        config.rollout.sglang.tp = max(config.rollout.sglang.tp, config.cluster.gpus_per_node)
    changes = [change["settings"] for change in changes_that_fit(config)]
    # One that gives a size would decide on all of them, and the number of processes is no setting of a job.
    words = [
        as_words(settings)
        for settings in changes
        if not any(name.startswith(("layout.", "cluster.")) for name in settings)
    ]
    if more := [settings["cluster.nodes"] for settings in changes if "cluster.nodes" in settings]:
        words.append(f"{min(more) * config.cluster.gpus_per_node} GPUs (cluster.nodes={min(more)})")
    why = f"the smallest takes about {in_gb(smallest.bytes)} GB of a GPU, and {in_gb(limit)} may be planned"
    if smallest.bytes <= limit:
        why = "the trainer's alone would, but beside it there is no room for engines of any size (rollout.sglang.tp)"
        if config.rollout.engine != "sglang":
            why = f"built, the smallest takes more than the {in_gb(limit)} GB of a GPU that may be planned"
    nearest = f"it would fit with {', or '.join(words)}" if words else "start more processes, or lower model.context"
    return f"no layout of {_processes(config)} GPUs fits: {why}; {nearest}"


def _cannot_be_arranged(config: Config) -> ConfigError:
    """The error for processes that no layout divides: what data parallelism alone lacks."""
    processes = _processes(config)
    try:
        alone = replace(config.layout, auto=False)
        check_layout(replace(config, layout=alone, optimizer=replace(config.optimizer, overlap=False)), processes)
    except ConfigError as error:
        return error
    return ConfigError(f"{processes} processes cannot be arranged for this model in any layout")


def _in_words(chosen: Config, given: Config) -> str:
    """A chosen layout, and what else was chosen with it."""
    layout, before = chosen.layout, given.layout
    sizes = {"dp": _processes(given) // (layout.tp * layout.pp * layout.cp)}
    sizes |= {name: getattr(layout, name) for name in ("tp", "pp", "vpp", "cp", "ep", "etp")}
    parts = [" x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"]
    if layout.recompute != before.recompute:
        parts.append(f"recompute {layout.recompute}")
    if layout.micro_batch_tokens != before.micro_batch_tokens:
        parts.append(f"micro-batches of {layout.micro_batch_tokens:,} tokens")
    if chosen.rollout.sglang.tp != given.rollout.sglang.tp:
        parts.append(f"engines of {chosen.rollout.sglang.tp} GPUs")
    return ", ".join(parts)


def _processes(config: Config) -> int:
    return (config.cluster.nodes or 1) * config.cluster.gpus_per_node
