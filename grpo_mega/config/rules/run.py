"""Rules about the run's name and directory, the alarms that stop it, and the profiled steps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, fields
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from grpo_mega.config.recorded import run_of, written
from grpo_mega.config.schema import ANY, REWARD_MODELS, TRACKERS, AlarmsConfig, Config
from grpo_mega.config.step_range import read_steps

OF_THE_STATE = ("beta1", "beta2", "eps", "weight_decay", "parts", "frozen")
"""Settings of the optimizer that a checkpoint's groups of parameters have, and that loading it brings back."""
LONGEST_NAME = 100
"""Longest name of a run, in characters; it becomes part of file names."""


def run_problems(config: Config) -> Iterator[str]:
    """Rules about the names of the run and of the alarms that stop it."""
    if not re.fullmatch(r"\w[\w.-]*", config.run.name, re.ASCII):
        yield (
            f"run.name={config.run.name!r} must be a plain file name: letters, digits, '_', '-' and '.', "
            "beginning with a letter, digit or '_'"
        )
    if len(config.run.name) > LONGEST_NAME:
        yield f"run.name has {len(config.run.name)} characters and names a directory; choose at most {LONGEST_NAME}"
    if not config.run.root.strip():
        yield "run.root='' names no directory; set run.root=. for the working directory, or run.root=runs"
    yield from _fork_problems(config)
    yield from _profile_problems(config)
    yield from _tracker_problems(config)
    known = [field.name for field in fields(AlarmsConfig)]
    for name in config.run.stop_on:
        if name not in (ANY, *known):
            close = get_close_matches(name, known, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            yield f"run.stop_on names the alarm {name!r}: choose of {', '.join((ANY, *known))}{meant}"
        elif name != ANY and getattr(config.alarms, name) is None:
            yield f"run.stop_on names the alarm {name}, which is off: give alarms.{name} a threshold"


def _fork_problems(config: Config) -> Iterator[str]:
    """A message when `run.fork` is of this run, and for each setting that the optimizer's saved state has decided."""
    fork = config.run.fork
    if not fork:
        return
    if run_of(fork).resolve() == (Path(config.run.root) / config.run.name).resolve():
        yield f"run.fork={fork} is a checkpoint of this run itself; give the fork another run.name"
        return
    before, now = written(run_of(fork)).get("optimizer", {}), asdict(config.optimizer)
    for name in OF_THE_STATE:
        if name in before and before[name] != now[name]:
            yield (
                f"optimizer.{name}={now[name]} differs from that of run.fork's run, {before[name]}, with which its "
                "optimizer goes on: leave it as it was, or start from the weights alone: run.init_from"
            )


def _profile_problems(config: Config) -> Iterator[str]:
    """A message when `run.profile_steps` is not a range, or contains no step of this run."""
    if config.run.profile_steps is None:
        return
    try:
        steps = read_steps(config.run.profile_steps)
    except ValueError as error:
        yield f"run.profile_steps: {error}; null profiles none"
        return
    if config.run.trains not in REWARD_MODELS and steps[0] > config.run.steps:
        yield (
            f"run.profile_steps={config.run.profile_steps} begins after the last step: run.steps={config.run.steps}; "
            "choose steps of the run, or null for none"
        )


def _tracker_problems(config: Config) -> Iterator[str]:
    """A message for each tracker that is unknown, or not installed here."""
    for name in config.run.trackers:
        if name not in TRACKERS:
            close = get_close_matches(name, TRACKERS, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            yield f"run.trackers names {name!r}: choose of {', '.join(TRACKERS)}{meant}"
        elif find_spec(name) is None:
            yield f"run.trackers names {name}, which is not installed: pip install {name}"
