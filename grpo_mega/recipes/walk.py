"""Runs the stages of a recipe one after the other; each can be stopped and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType

import psutil

from grpo_mega.platform.files import only_one
from grpo_mega.platform.orphans import end_with_parent
from grpo_mega.recipes.commands import begin, check, command_of, finish, refuse_changes
from grpo_mega.recipes.progress import DONE, again_mark, progress_of, set_aside
from grpo_mega.recipes.recipe import Recipe

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StageFailed(Exception):
    """The command of a stage has failed; the message names the stage."""


class WalkStopped(Exception):
    """The recipe was asked to stop, and the stage in progress has saved its state."""


def walk(recipe: Recipe, again: str | None, tell: Callable[[str], None]) -> None:
    """Runs all unfinished stages, in order.

    Args:
        recipe: The recipe.
        again: A stage to do again, with all that depend on it; their products are set aside. None for no stage.
        tell: Prints a line of text.

    Raises:
        InputError: Settings of a stage are invalid, or something has changed since a stage was done; nothing is
            started.
        StageFailed: A command has failed.
        WalkStopped: A signal arrived. The same call resumes.
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
            # Something may have changed while earlier stages ran.
            refuse_changes(recipe, {stage.name: known[stage.name]})
            if known[stage.name].state != DONE:
                child.refuse_to_go_on(f"before stage {stage.name}")
                about = f": {stage.about}" if stage.about else ""
                tell(f"\n== {number} of {len(recipe.stages)}, {stage.name}{about}")
                start = begin(recipe, stage, command_of(recipe, stage, known), known)
                code = child.run(start.command)
                # A finished stage is recorded even if a signal came meanwhile.
                if code == 0:
                    finish(recipe, stage, start, known)
                child.refuse_to_go_on(f"in stage {stage.name}")
                if code:
                    raise StageFailed(f"stage {stage.name} failed (exit code {code}); the same command resumes it")


def begin_again(recipe: Recipe, name: str) -> None:
    """Sets aside the products of a stage and its dependents, unless this was done and the stage is not finished yet.

    Products that were replaced by hand, and products that depend only on them, are kept, except for the stage's.
    """
    mark = again_mark(recipe, name)
    if mark.exists():
        return
    by_hand = [other for other, one in progress_of(recipe).items() if one.report and one.report["words"] is None]
    # The stage itself comes after those that depend on it, and the mark last: after a kill in between, the same command
    # finds the stage still done and sets aside what is left.
    for stage in reversed(recipe.after(name, kept=by_hand)):
        set_aside(recipe, stage)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()


@dataclass
class Child:
    """The running command, which never outlives this process.

    Attributes:
        process: Process of the command; None between two commands.
        received: Name of the signal that asked this process to stop, or empty. It is forwarded to the ranks as SIGTERM,
            on which a run saves: torchrun would kill them 30 seconds later.
    """

    process: subprocess.Popen[bytes] | None = None
    received: str = ""

    @contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        """Context in which `SIGNALS` stop the command, and prevent further ones."""
        before = {number: signal.signal(number, self._stop) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self, command: list[str]) -> int:
        """Runs a command; returns its exit code."""
        environment = {"OMP_NUM_THREADS": "1"} | dict(os.environ)
        # In a separate session the command gets no Ctrl-C from the terminal: `_stop` alone decides what it is sent.
        parent = partial(end_with_parent, os.getpid())
        self.process = subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=parent)
        # A signal may have come before there was a process to forward it to.
        if self.received:
            self._terminate(self.process)
        code = self.process.wait()
        self.process = None
        return code

    def refuse_to_go_on(self, where: str) -> None:
        """Raises WalkStopped when a signal has arrived."""
        if self.received:
            raise WalkStopped(f"{self.received} received, stopped {where}; the same command resumes there")

    def _stop(self, number: int, _: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        if self.process:
            self._terminate(self.process)

    @staticmethod
    def _terminate(process: subprocess.Popen[bytes]) -> None:
        """Sends SIGTERM to the ranks started by torchrun, or to the command itself if there are none."""
        ranks = []
        with suppress(psutil.NoSuchProcess):
            ranks = psutil.Process(process.pid).children()
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.terminate()
        if not ranks:
            process.terminate()
