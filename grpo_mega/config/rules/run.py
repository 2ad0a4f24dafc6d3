"""Rules about the run's name and directory, the alarms that stop it, and the profiled steps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, fields
from importlib.util import find_spec
from pathlib import Path

from grpo_mega.config.derived import read_steps
from grpo_mega.config.recorded import run_of, written
from grpo_mega.config.rules.shared import unknown
from grpo_mega.config.schema import ANY, REWARD_MODELS, TRACKERS, AlarmsConfig, OptimizerConfig, RunConfig
from grpo_mega.errors import InputError

OF_THE_STATE = ("beta1", "beta2", "eps", "weight_decay", "parts", "frozen")
"""Settings of the optimizer that a checkpoint's groups of parameters have, and that loading it brings back."""
LONGEST_NAME = 100
"""Longest name of a run, in characters; it becomes part of file names."""


def run_problems(run: RunConfig, alarms: AlarmsConfig, optimizer: OptimizerConfig) -> Iterator[InputError]:
    """Rules about the names of the run, of its trackers and of the alarms that stop it, and about profiled steps."""
    if not re.fullmatch(r"\w[\w.-]*", run.name, re.ASCII):
        fix = "use letters, digits, '_', '-' and '.', beginning with a letter, digit or '_'"
        yield InputError(f"run.name={run.name!r}", "not a plain file name", fix)
    if len(run.name) > LONGEST_NAME:
        what = f"{len(run.name)} characters are too many for the name of a directory"
        yield InputError(f"run.name={run.name[:20]}...", what, f"choose at most {LONGEST_NAME}")
    if not run.root.strip():
        fix = "set run.root=. for the working directory, or run.root=runs"
        yield InputError("run.root=''", "not a directory", fix)
    if run.fork:
        yield from _fork_problems(run, optimizer)
    if run.profile_steps is not None:
        yield from _profile_problems(run)
    for name in run.trackers:
        if name not in TRACKERS:
            yield unknown(f"run.trackers={run.trackers}", name, TRACKERS)
        elif find_spec(name) is None:
            yield InputError(f"run.trackers={run.trackers}", f"{name} is not installed", f"pip install {name}")
    known = (ANY, *(field.name for field in fields(AlarmsConfig)))
    for name in run.stop_on:
        if name not in known:
            yield unknown(f"run.stop_on={run.stop_on}", name, known)
        elif name != ANY and getattr(alarms, name) is None:
            yield InputError(f"run.stop_on={run.stop_on}", f"{name} is off", f"give alarms.{name} a threshold")


def _fork_problems(run: RunConfig, optimizer: OptimizerConfig) -> Iterator[InputError]:
    """An error when `run.fork` is of this run, and for each setting that the optimizer's saved state has decided."""
    fork = run.fork or ""
    if run_of(fork).resolve() == (Path(run.root) / run.name).resolve():
        yield InputError(f"run.fork={fork}", "one of this run's own checkpoints", "give the fork another run.name")
        return
    # A fork loads the optimizer's state, and with it these settings: other values here would silently have no effect.
    before, now = written(run_of(fork)).get("optimizer", {}), asdict(optimizer)
    for name in OF_THE_STATE:
        if name in before and before[name] != now[name]:
            yield InputError(
                f"optimizer.{name}={now[name]}",
                f"the optimizer's state of run.fork was saved with {before[name]}",
                "set it to that, or start from the weights alone: run.init_from",
            )


def _profile_problems(run: RunConfig) -> Iterator[InputError]:
    """An error when `run.profile_steps` is not a range, or contains no step of this run."""
    where = f"run.profile_steps={run.profile_steps}"
    try:
        first = read_steps(run.profile_steps or "")[0]
    except InputError as error:
        yield InputError(where, error.what, f"{error.fix}, or null for none")
        return
    if run.trains not in REWARD_MODELS and first > run.steps:
        what = f"begins after the last step, run.steps={run.steps}"
        yield InputError(where, what, "choose steps of the run, or null for none")
