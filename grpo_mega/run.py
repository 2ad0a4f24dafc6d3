"""A run owns time: which stage is at work, in which phase, whether it was asked to stop, what is saved and recorded.

It knows no algorithm: stages do (`grpo_mega/stages`), one step at a time; `Stage` is what it asks of them. A run that
was stopped or killed continues in the stage, and at the step, of its newest checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from grpo_mega.checkpoint import checkpoint, random_state, step_in_progress
from grpo_mega.checkpoint.step_in_progress import StepInProgress
from grpo_mega.config.schema import Config
from grpo_mega.models.policy import Policy
from grpo_mega.models.reference import ReferencePolicy
from grpo_mega.observe.metrics import METRICS
from grpo_mega.observe.recorder import Recorder
from grpo_mega.observe.summary import versions, warn_of_other_versions
from grpo_mega.observe.timer import PhaseTimer
from grpo_mega.platform.stop import Interrupted, Stopped, StopRequest
from grpo_mega.types import Group

logger = logging.getLogger(__name__)

Metrics = dict[str, float]


@dataclass
class StepRecord:
    """What is kept of a finished step: its numbers, and the scored answers if there were any."""

    metrics: Metrics
    groups: list[Group] = field(default_factory=list)


class Stateful(Protocol):
    """Something whose state is plain JSON."""

    def state_dict(self) -> dict[str, Any]:
        """The state, the same on every rank."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state_dict` was called."""
        ...


class Stage(Stateful, Protocol):
    """One algorithm: it says what it trains, and does one step at a time. Every rank makes every call.

    Attributes:
        name: Names its checkpoints and metrics, unless it is the last stage of the run: that one's have no prefix.
        save_every: Steps between checkpoints; 0 saves only its last step.
        reference: The reference policy that its checkpoints hold, if it has one.
        in_progress: The rest of a step that was stopped between two of its updates.
    """

    name: str
    save_every: int
    reference: ReferencePolicy | None
    in_progress: StepInProgress | None

    def begin(self, run: Run) -> None:
        """Starts at the weights that the policy has when the stage before is done. May be interrupted."""
        ...

    def prepare(self) -> None:
        """Makes what a checkpoint is loaded into, such as the optimizer."""
        ...

    def step(self, run: Run) -> StepRecord:
        """Does step `run.step + 1`, or the rest of it.

        Raises:
            Interrupted: The step is as if it had not begun, or `in_progress`.
        """
        ...

    def is_done(self, steps: int) -> bool:
        """Whether nothing is left to do after so many steps."""
        ...

    def end(self, run: Run) -> None:
        """What is left when the last step is done and saved. May be interrupted, and is then done again."""
        ...

    def progress(self, step: int) -> str:
        """How far the step in progress, after `step` whole ones, has come, in words; empty between two steps."""
        ...


class Run:
    """The stages of a run, and what they have in common.

    Attributes:
        stage: The stage at work.
        step: Its finished steps.
        begun: Whether it has begun: its weights, optimizer and data stand where `step` says.
        newest: The newest checkpoint that is complete.
    """

    def __init__(
        self, config: Config, policy: Policy, stages: Sequence[Stage], recorder: Recorder, timer: PhaseTimer
    ) -> None:
        """Stands before the first step of the first stage."""
        self.config = config.run
        self.layout = asdict(config.layout)
        self.policy = policy
        self.stages = list(stages)
        self.recorder = recorder
        self.timer = timer
        self.stop = StopRequest()
        self.stage = self.stages[0]
        self.step = 0
        self.begun = False
        self.newest: Path | None = None
        self._saving: checkpoint.Saving | None = None
        self._seconds_before: Metrics = {}

    # What stages call.

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The body is measured under this name, and is a sign of life; every rank must come here.

        Raises:
            Interrupted: On every rank, before the body, when any of them was asked to stop.
        """
        self.raise_if_stopping()
        with self.timer(name):
            yield

    def raise_if_stopping(self) -> None:
        """Raises `Interrupted` on every rank when any of them was asked to stop; every rank must call it."""
        if self.policy.topology.any_rank(self.stop.asked(), self.policy.platform.device):
            raise Interrupted

    def is_asked_to_stop(self) -> bool:
        """Whether this rank was asked to stop. Whoever asks in the middle of a phase is alive: a sign of life."""
        self.timer.beat()
        return self.stop.asked()

    @contextmanager
    def undone_if_stopped(self, *states: Stateful) -> Iterator[None]:
        """What the body did to these, such as the order of prompts, and to random generators is undone by a stop."""
        before, generators = [each.state_dict() for each in states], random_state.current()
        try:
            yield
        except Interrupted:
            for each, state in zip(states, before, strict=True):
                each.load_state_dict(state)
            random_state.restore(generators)
            raise

    # The loop.

    def execute(self) -> None:
        """Goes through the stages that are left, to the end of the last one.

        Raises:
            Stopped: A signal asked for it; what was done is saved, see `grpo_mega.platform.stop`.
        """
        self.stop.listen()
        try:
            for stage in self.stages[self.stages.index(self.stage) :]:
                self.enter(stage)
                self._train()
                stage.end(self)
        except Interrupted:
            raise Stopped(self._save_and_say_where()) from None

    def enter(self, stage: Stage) -> None:
        """Makes this the stage at work, and has it begin unless it has."""
        if stage is not self.stage:
            self.stage, self.step, self.begun = stage, 0, False
        if not self.begun:
            random_state.reseed(self.config.seed, step=0)
            self.recorder.open_metrics(-1, self._metrics_file)
            stage.begin(self)
            self.begun = True

    def _train(self) -> None:
        """Has the stage do its steps, records each, and saves at the end and every so often."""
        self.timer.step_seconds()  # what came before belongs to no step
        while not self.stage.is_done(self.step):
            record = self.stage.step(self)
            self.step += 1
            self.recorder.step(self.step, record.metrics | self._step_seconds(), record.groups)
            self.finish_saving(wait=False)
            last = self.stage.is_done(self.step)
            if last or (self.stage.save_every and self.step % self.stage.save_every == 0):
                self.save(wait=last or not self.config.async_save)

    def where(self) -> str:
        """Where the run stands, in words."""
        of, update = ("", " before its first update") if self._is_last else (f" of {self.stage.name}", "")
        if not self.begun:
            return f"before the first step{of}"
        if progress := self.stage.progress(self.step):
            return f"in step {self.step + 1}{of} {progress}"
        if self.stage.is_done(self.step):
            return f"after step {self.step}{of}, before the result was measured"
        return f"in step {self.step + 1}{of}{update}"

    def _save_and_say_where(self) -> str:
        where = f"stopped {self.where()}"
        if self.begun:
            self.save()
        if self.newest is None:
            return f"{where}; nothing was done that could be lost"
        return f"{where}; {self.newest} is saved, the same command continues there"

    def _step_seconds(self) -> Metrics:
        """Wall seconds of the step by phase, and in total."""
        phases = {f"time/{name}": spent.wall for name, spent in self.timer.step_seconds().items()}
        # Measured once per step; the checkpoint's time is that of the one before this step.
        apart = phases.get("time/evaluate", 0.0) + phases.get("time/checkpoint", 0.0)
        return {**phases, "time/step": sum(phases.values()) - apart}

    def total_seconds(self) -> Metrics:
        """Wall seconds of the whole run by phase, over all its starts."""
        now = {name: spent.wall for name, spent in self.timer.totals().items()}
        names = [*self._seconds_before, *(name for name in now if name not in self._seconds_before)]
        return {name: round(self._seconds_before.get(name, 0.0) + now.get(name, 0.0), 2) for name in names}

    def finish(self, achieved: dict[str, Any]) -> None:
        """Records what the run achieved, and with what."""
        topology = self.policy.topology
        summary = {
            "status": "completed",
            "steps": self.step,
            "seconds": self.total_seconds(),
            "layout": self.layout | {"dp": topology.dp_size},
            "world_size": topology.world_size,
            "parameters": self.policy.parameters(),
            "versions": versions(),
        }
        self.recorder.finish(summary | achieved)

    # Checkpoints.

    @property
    def checkpoints(self) -> Path:
        """The run's folder of checkpoints."""
        return Path(self.config.root) / self.config.name / "checkpoints"

    @property
    def _is_last(self) -> bool:
        return self.stage is self.stages[-1]

    def save(self, wait: bool = True) -> None:
        """Writes a checkpoint of the whole run, unless the newest is of this moment.

        Without `wait`, helper processes write it while training goes on.
        """
        self.finish_saving()
        earlier = None if self._is_last else (self.stages.index(self.stage) + 1, self.stage.name)
        path = checkpoint.step_path(self.checkpoints, self.step, self.stage.in_progress, earlier)
        if path == self.newest:
            return
        with self.timer("checkpoint"):
            self._saving = checkpoint.Saving(
                path, self.policy, self.state_dict(), self.stage.reference, not wait, self.stage.in_progress
            )
        if wait:
            self.finish_saving()

    def finish_saving(self, wait: bool = True) -> None:
        """Completes the checkpoint that is being written, if there is one, and deletes the oldest ones."""
        if self._saving is None:
            return
        with self.timer("checkpoint"):
            if not self._saving.finish(wait):
                return
            self.newest, self._saving = self._saving.path, None
            if self.policy.topology.is_main:
                checkpoint.prune(self.newest, self.config.keep_checkpoints, self.config.keep_every)
                logger.info("the checkpoint %s is complete", self.newest)

    def resume(self) -> bool:
        """Continues at the newest checkpoint of the run directory; False when there is none.

        Raises:
            ValueError: All checkpoints are damaged, or the newest is of a stage that this run does not have.
        """
        with self.timer("checkpoint"):  # reads all of it, and then again: two signs of life
            newest = checkpoint.newest_whole(self.checkpoints)
        if newest is None:
            return False
        self.stage = self._stage_of(newest)
        self.stage.prepare()
        with self.timer("checkpoint"):
            state = checkpoint.load(newest, self.policy, self.stage.reference)
        self.load_state_dict(state)
        random_state.load(newest, self.config.seed, self.step)
        self.stage.in_progress, self.newest, self.begun = step_in_progress.load(newest), newest, True
        of = "" if self._is_last else f" of {self.stage.name}"
        where = self.where() if self.stage.in_progress else f"after step {self.step}{of}"
        self.recorder.note(f"continuing {where}, from {newest}")
        self.recorder.open_metrics(self.step, self._metrics_file)
        return True

    @property
    def _metrics_file(self) -> str:
        return METRICS if self._is_last else f"{self.stage.name}.jsonl"

    def _stage_of(self, path: Path) -> Stage:
        name = checkpoint.stage_of(path) or self.stages[-1].name
        for stage in self.stages:
            if stage.name == name:
                return stage
        names = ", ".join(stage.name for stage in self.stages)
        raise ValueError(
            f"the checkpoint {path} is of the stage {name}, and this run has only: {names}. Give it that stage again, "
            "or choose another run.name"
        )

    def state_dict(self) -> dict[str, Any]:
        """What the run needs to go on besides tensors and generators. Sampling noise is a function of counters."""
        return {
            "step": self.step,
            "seconds": self.total_seconds(),
            "versions": versions(),
            "stage": self.stage.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken. Raises ValueError when that was before runs had stages."""
        if "stage" not in state:
            raise ValueError(
                f"the checkpoints of {self.checkpoints} were written before runs had stages: give this run another "
                "run.name, and base.train=false run.init_from=CHECKPOINT to start from their weights"
            )
        self.step, self._seconds_before = state["step"], state["seconds"]
        self.stage.load_state_dict(state["stage"])
        warn_of_other_versions(state["versions"])
