"""The chosen layout, memory and disk space."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

from grpo_mega import platform
from grpo_mega.checks import run_directory
from grpo_mega.config.schema import Config, RunConfig
from grpo_mega.forecast.dry_run.refusals import Refusals
from grpo_mega.forecast.planning.lines import (
    checkpoints_at_once,
    engine_verdict,
    exports_in_all,
    in_gb,
    parameters,
    verdict,
)
from grpo_mega.observe.run_dir import CHECKPOINTS

EXPORTS = "export"
"""Folder of a run directory in which its exports lie."""


def laid_out(config: Config, vocab_size: int, processes: int | None) -> Config:
    """The configuration with the layout that the job will choose and the machines it is chosen for; prints the choice.

    Raises:
        ConfigError: No layout can be used.
        ImportError: torch or Megatron is not installed here.
    """
    platform.start_planning()
    # Imported late: the import loads Megatron, which may be missing here, and whose buffers go to the meta device only
    # once planning has started.
    from grpo_mega.forecast.planning.choice import choose, machines_ahead

    machines = machines_ahead(config.cluster, processes)
    chosen = choose(config, vocab_size, machines)
    print(f"\n{chosen.why}")
    if machines.gpu_memory_mib is None:
        print("on GPUs the job chooses by their memory; cluster=h100 shows that choice")
    return replace(chosen.config, cluster=machines)


def planned(config: Config, vocab_size: int, processes: int | None) -> dict[str, Any]:
    """Plan of the run (`forecast/planning/plan.py`), for `processes` or the number in the configuration.

    Raises:
        InputError: The machines do not fit the layout.
        ImportError: torch or Megatron is not installed here.
    """
    platform.start_planning()
    from grpo_mega.forecast.planning.plan import plan

    cluster = config.cluster
    if processes and not cluster.nodes:
        cluster = replace(cluster, nodes=1, gpus_per_node=processes)
    return plan(replace(config, cluster=cluster, model=replace(config.model, vocab_size=vocab_size)))


def show_plan(run: RunConfig, plan: dict[str, Any], refusals: Refusals) -> None:
    """Prints the planned memory of a GPU and the disk space of checkpoints; a lack of either is a problem."""
    lines = {"training": verdict(plan)}
    if plan["engine"]:
        lines["engines"] = engine_verdict(plan["engine"])
    processes = f"{plan['gpus']} GPUs or processes" if plan["gpus"] > 1 else "one GPU or process"
    print(f"\n{parameters(plan)} on {processes}")
    for what, line in lines.items():
        print(f"  {what}: {line}")
    if plan["fits"] is False:
        refusals.add(
            f"the memory of a GPU: {lines['training']}; lower layout.micro_batch_tokens or model.context, or spread "
            "the model over more GPUs (layout.tp, layout.pp, layout.ep); tools/plan.py with these settings and "
            "--propose finds a layout that fits"
        )
    if plan["engine"] and not plan["engine"]["fits"]:
        refusals.add(f"the memory of a GPU while engines have it: {lines['engines']}")
    _show_disk(run, plan, refusals)


def _show_disk(run: RunConfig, plan: dict[str, Any], refusals: Refusals) -> None:
    """Prints the largest disk space of checkpoints and exports; a lack of it is a problem."""
    path = run_directory(run)
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    # Names that begin with a dot are incomplete and will be replaced. At least one more checkpoint is always written,
    # before an older one is removed.
    saved = len([*(path / CHECKPOINTS).glob("[!.]*")])
    checkpoints = max(1, checkpoints_at_once(run) - saved)
    exports = max(0, exports_in_all(run) - len([*(path / EXPORTS).glob("[!.]*")]))
    needed = {"checkpoints": checkpoints * plan["checkpoint"], "exports": exports * plan["export"]}
    free = shutil.disk_usage(there).free
    print(
        f"  disk: room for {checkpoints} checkpoints of {in_gb(plan['checkpoint'])} GB and {exports} exports of "
        f"{in_gb(plan['export'])} GB is needed; {in_gb(free)} GB are free in {there}"
    )
    if saved:
        print(f"  {path} has begun: the run continues at its newest checkpoint, if steps are left")
    if sum(needed.values()) > free:
        refusals.add(
            f"{there} has {in_gb(free)} GB free, and checkpoints need {in_gb(needed['checkpoints'])} GB "
            f"(run.save_every={run.save_every}, run.keep_checkpoints={run.keep_checkpoints}, run.keep_every="
            f"{run.keep_every}, and one that is being written), exports {in_gb(needed['exports'])} GB "
            f"(run.export_every={run.export_every}): make room, choose another run.root, or keep fewer"
        )
