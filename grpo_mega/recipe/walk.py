"""Walks through the stages of a recipe: one command after the other, each of which can be stopped and goes on."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType

import psutil

from grpo_mega.platform.files import only_one
from grpo_mega.platform.orphans import end_with_parent
from grpo_mega.recipe.commands import begin, check, command_of, finish, refuse_changes
from grpo_mega.recipe.progress import DONE, Progress, again_mark, progress_of, set_aside
from grpo_mega.recipe.recipe import Recipe, Stage

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StageFailed(Exception):
    """A stage's command has failed; the message names it."""


class WalkStopped(Exception):
    """The recipe was asked to stop, and the stage in progress has saved what it had."""


def walk(recipe: Recipe, again: str | None, tell: Callable[[str], None]) -> None:
    """Does all stages that are not done, in order.

    Args:
        recipe: The recipe.
        again: A stage to do again, with all that depend on it; what they made is set aside. None for no stage.
        tell: Prints a line.

    Raises:
        ValueError: Settings of a stage cannot be used, or something has changed since one was done; nothing is begun.
        StageFailed: A command has failed.
        WalkStopped: A signal arrived. The same call goes on.
    """
    check(recipe)
    recipe.root.mkdir(parents=True, exist_ok=True)
    child = Child()
    with child.stopped_by_signals(), only_one(recipe.root / "recipe"):
        if again is not None:
            begin_again(recipe, again)
        refuse_changes(recipe, progress_of(recipe))
        for number, stage in enumerate(recipe.stages.values(), start=1):
            known = progress_of(recipe)
            refuse_changes(recipe, {stage.name: known[stage.name]})  # something may have changed in the meantime
            if known[stage.name].state != DONE:
                child.refuse_to_go_on(f"before stage {stage.name}")
                about = f": {stage.about}" if stage.about else ""
                tell(f"\n== {number} of {len(recipe.stages)}, {stage.name}{about}")
                _do(recipe, stage, known, child)


def begin_again(recipe: Recipe, name: str) -> None:
    """Sets aside what a stage and all that depend on it have made, unless that was done and the stage is not done yet.

    Products that were put in their places by hand stay, and what follows from these alone; but for the stage itself.
    """
    mark = again_mark(recipe, name)
    if mark.exists():
        return
    by_hand = [other for other, one in progress_of(recipe).items() if one.report and one.report["words"] is None]
    for stage in reversed(recipe.after(name, kept=by_hand)):
        set_aside(recipe, stage)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()


def _do(recipe: Recipe, stage: Stage, known: Mapping[str, Progress], child: Child) -> None:
    """Runs the command of a stage to its end, and reports it."""
    start = begin(recipe, stage, command_of(recipe, stage, known), known)
    code = child.run(start.command)
    if code == 0:
        finish(recipe, stage, start, known)
    child.refuse_to_go_on(f"in stage {stage.name}")
    if code:
        raise StageFailed(f"stage {stage.name} has failed (exit code {code}); the same command goes on there")


@dataclass
class Child:
    """The command that runs now. It ends with this process, however that one ends.

    Attributes:
        process: The command; None between two.
        received: The name of the signal that asked this process to stop; empty when none did. It is passed on to the
            ranks as SIGTERM, on which a run saves: torchrun would kill them 30 seconds later.
    """

    process: subprocess.Popen[bytes] | None = None
    received: str = ""

    @contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        """A context in which `SIGNALS` stop the command, and whatever would follow it."""
        before = {number: signal.signal(number, self._stop) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self, command: list[str]) -> int:
        """Runs a command; returns its exit code."""
        environment = {"OMP_NUM_THREADS": "1"} | dict(os.environ)
        parent = partial(end_with_parent, os.getpid())
        self.process = subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=parent)
        if self.received:  # just before there was a process to pass it on to
            self._terminate(self.process)
        code = self.process.wait()
        self.process = None
        return code

    def refuse_to_go_on(self, where: str) -> None:
        """Raises WalkStopped when a signal has arrived."""
        if self.received:
            raise WalkStopped(f"{self.received} received, stopped {where}; the same command goes on there")

    def _stop(self, number: int, _: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        if self.process:
            self._terminate(self.process)

    @staticmethod
    def _terminate(process: subprocess.Popen[bytes]) -> None:
        """SIGTERM to the ranks that torchrun has started, or to the command itself where there are none."""
        ranks = []
        with suppress(psutil.NoSuchProcess):
            ranks = psutil.Process(process.pid).children()
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.terminate()
        if not ranks:
            process.terminate()
