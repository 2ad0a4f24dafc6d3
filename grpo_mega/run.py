"""A run: the sequence of its stages and steps, with their phases, signals to stop, checkpoints and records.

The algorithms are in the stages (`grpo_mega/stages`), whose interface is `Stage`; checkpoints and exports are written
by `saving.py`. A run that was stopped or killed resumes at the stage and step of its newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from grpo_mega.checkpoint import checkpoint, in_flight, random_state, step_in_progress
from grpo_mega.config.schema import LayoutConfig, RunConfig
from grpo_mega.errors import InputError
from grpo_mega.models.model import Model
from grpo_mega.observe.metrics import METRICS
from grpo_mega.observe.profile import Profile
from grpo_mega.observe.recorder import Recorder
from grpo_mega.observe.summary import versions, warn_of_other_versions
from grpo_mega.observe.timer import PhaseTimer, Use, step_seconds, throughput, use_of_ranks, working_seconds
from grpo_mega.platform import peak_memory_bytes, trace
from grpo_mega.platform.collectives import from_all_ranks, from_main_rank
from grpo_mega.platform.peaks import peak_tflops
from grpo_mega.platform.stop import Interrupted, Stopped, StoppedByAlarm, StopRequest
from grpo_mega.saving import Checkpoints, Exporter, Saved, export
from grpo_mega.types import Step, StreamState

Metrics = dict[str, float]


@dataclass
class StepRecord:
    """The records of a finished step: its metrics, a selection of its samples, and for each layer with experts the
    number of tokens that each expert received in the step's last update. The latter two may be empty."""

    metrics: Metrics
    shown: list[dict[str, Any]] = field(default_factory=list)
    loads: dict[str, list[float]] = field(default_factory=dict)


class Stateful(Protocol):
    """An object with a state that can be restored."""

    def state_dict(self) -> Any:
        """The state. That of a stage is plain JSON, and the same on every rank."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Restores the state that `state_dict` returned."""
        ...


class Stage(Stateful, Protocol):
    """Interface of a stage: one algorithm, run one step at a time. Every rank makes every call.

    Attributes:
        name: Name of the stage, the prefix of its checkpoints and metrics except in a run's last stage.
        save_every: Steps between checkpoints; 0 saves only the last step.
        most_steps: Number of its steps, or an upper bound where it ends once it has learned enough.
        in_progress: The current step, from when its data is complete until it is recorded; otherwise None.
        in_flight: Samples that outlive a step; None in a stage without any.
    """

    name: str
    save_every: int
    most_steps: int
    in_progress: Step | None
    in_flight: StreamState | None

    @property
    def models(self) -> Sequence[Saved]:
        """Models in the stage's checkpoints, the run's model first."""
        ...

    def begin(self, run: Run) -> None:
        """Starts the stage, from the model's weights after the previous stage. May be interrupted."""
        ...

    def prepare(self) -> None:
        """Creates the objects that a checkpoint is loaded into, such as the optimizer."""
        ...

    def step(self, run: Run) -> StepRecord:
        """Does step `run.step + 1`, or the rest of it.

        Raises:
            Interrupted: The step is as if it had not begun, or `in_progress`.
        """
        ...

    def is_done(self, steps: int) -> bool:
        """Whether the stage ends after `steps` steps."""
        ...

    def end(self, run: Run) -> None:
        """Finishes the stage after its last step is saved. May be interrupted, and is then called again."""
        ...

    def progress(self, step: int) -> str:
        """Progress within the step after `step` complete ones, in words; empty between two steps."""
        ...


class Run:
    """The stages of a run, with their common phases, checkpoints and records.

    Attributes:
        model: The model that the run trains: the policy, or a reward model.
        stage: The current stage.
        step: Number of finished steps of the current stage.
        begun: Whether the current stage has begun; if so, its weights, optimizer and data are those after `step` steps.
        checkpoints: The run's checkpoints.
    """

    def __init__(
        self,
        config: RunConfig,
        layout: LayoutConfig,
        model: Model,
        stages: Sequence[Stage],
        recorder: Recorder,
        timer: PhaseTimer,
        exporter: Exporter | None = None,
    ) -> None:
        """Creates a run before the first step of its first stage."""
        self.config, self.layout = config, layout
        self.model, self.stages = model, list(stages)
        self.recorder, self.timer, self.exporter = recorder, timer, exporter
        self.checkpoints = Checkpoints(config, model, timer)
        self.stop = StopRequest()
        self.stage = self.stages[0]
        self.step = 0
        self.begun = False
        self._seconds_before: Metrics = {}

    # Called by stages.

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the body under this name, and sends a heartbeat; every rank must enter it.

        Raises:
            Interrupted: On every rank, before the body, when any rank was asked to stop.
        """
        # Asked before the body, so that all ranks leave at the same point, and none enters a collective of the phase
        # alone.
        self.raise_if_stopping()
        with self.timer(name):
            yield

    def raise_if_stopping(self) -> None:
        """Raises `Interrupted` on every rank when any was asked to stop; every rank must call it."""
        with trace.span("wait"):
            stopping = self.model.topology.any_rank(self.stop.asked(), self.model.platform.device)
        if stopping:
            raise Interrupted

    def is_asked_to_stop(self) -> bool:
        """Whether this rank was asked to stop; also sends a heartbeat."""
        self.timer.beat()
        return self.stop.asked()

    @contextmanager
    def undone_if_stopped(self, *states: Stateful) -> Iterator[None]:
        """Restores these states (such as the order of prompts) and random generators if the body is interrupted."""
        # The next start must draw the same prompts and samples as if the step had never begun.
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
        """Runs the remaining stages to the end of the last one.

        Raises:
            Stopped: A signal asked the run to stop, and its progress is saved; see `grpo_mega.platform.stop`.
            StoppedByAlarm: An alarm of `run.stop_on` was raised, and its progress is saved.
        """
        # Only from here on can progress be saved; before, `train` handles the signals by leaving at once.
        self.stop.listen()
        try:
            for stage in self.stages[self.stages.index(self.stage) :]:
                self.enter(stage)
                with Profile(self.config, self._is_last, self.model.topology.rank) as profile:
                    self._train(profile)
                stage.end(self)
        except Interrupted:
            message = f"stopped {self.where()}"
            # A stage that was interrupted while it began has nothing to save, and begins again at the next start.
            if self.begun:
                self.save()
            if self.newest is None:
                raise Stopped(f"{message}; nothing was done that could be lost") from None
            raise Stopped(f"{message}; {self.newest} is saved, the same command continues there") from None

    def enter(self, stage: Stage) -> None:
        """Makes `stage` the current one, and begins it unless it has begun."""
        if stage is not self.stage:
            self.stage, self.step, self.begun = stage, 0, False
        if not self.begun:
            # Each stage starts from the same generators, whether or not this process also ran the stages before.
            random_state.reseed(self.config.seed, step=0)
            self.recorder.open_metrics(-1, self._metrics_file, stage.most_steps)
            stage.begin(self)
            self.begun = True

    def _train(self, profile: Profile) -> None:
        """Runs the stage's steps; records each, and saves and exports periodically and at the end."""
        # Seconds before the first step, such as those of setup, must not count towards it.
        self.timer.step_seconds()
        # An earlier start may have been killed between a checkpoint and the export or the alarm that is due after it.
        self._export_if_due(missing_only=True)
        # A last stage without steps saves nothing in the loop below, although the weights of the earlier stages are the
        # result.
        if self._is_last and self.stage.is_done(0):
            self.save()
        self._stop_on_alarm()
        while not self.stage.is_done(self.step):
            profile.before(self.step + 1)
            with trace.step(self.step + 1, self.stage.name):
                record = self.stage.step(self)
            self.step += 1
            profile.after(self.step)
            # Recorded before the checkpoint is written; a start from an older checkpoint cuts off the records of later
            # steps.
            self.recorder.step(self.step, self._measured(record.metrics), record.shown, record.loads)
            # A checkpoint in the background gets its final name at the first end of a step after it is written.
            self.checkpoints.finish(wait=False)
            # The last checkpoint is waited for: what follows (the next stage, the results) must not be ahead of what is
            # saved.
            last = self.stage.is_done(self.step)
            if last or is_due(self.stage.save_every, self.step):
                self.save(wait=last or not self.config.async_save)
            self._export_if_due()
            self._stop_on_alarm()

    def _stop_on_alarm(self) -> None:
        """Saves and ends the run, between two steps of its last stage, when an alarm of `run.stop_on` was raised.

        Every rank must call it: only the main rank knows of alarms. After the last step the run is completed instead.
        """
        # The condition is the same on all ranks, so that either all or none enter the collective below.
        if not self.config.stop_on or not self._is_last or self.stage.is_done(self.step):
            return
        alarm = from_main_rank(self.recorder.alarm_that_stops)
        if alarm is None:
            return
        # A step in progress was loaded from the newest checkpoint, which therefore has the same step.
        if self.stage.in_progress is None:
            self.save()
        name = alarm["name"]
        self.recorder.finish(self._summary() | {"status": "stopped", "stopped_by": name})
        raise StoppedByAlarm(
            f"stopped after step {self.step} by the alarm {name} of step {alarm['step']}: {alarm['message']}, beyond "
            f"alarms.{name}={alarm['threshold']}. {alarm['action']} {self.newest} is saved; the same command continues "
            f"there when run.stop_on does not name the alarm, or when alarms.{name} allows this value"
        )

    def _export_if_due(self, missing_only: bool = False) -> None:
        """Exports the policy between two steps when due; `finish` exports after the last step, with its results."""
        if self.exporter is None or not self._is_last or self.stage.is_done(self.step):
            return
        if self.exporter.is_due(self.step) and not (missing_only and self.exporter.is_there(self.step)):
            self._export(self.exporter)

    def _export(self, exporter: Exporter) -> None:
        """Exports the policy. Raises Interrupted when a signal arrived before the export."""
        # An export may fail, a checkpoint must not: written at the same time, the two could fill the disk together.
        self.checkpoints.finish()
        with self.phase("export"):
            export(exporter, self.step, self.newest, self.model.topology.is_main)

    def where(self) -> str:
        """Progress of the run, in words."""
        of, update = ("", " before its first update") if self._is_last else (f" of {self.stage.name}", "")
        if not self.begun:
            return f"before the first step{of}"
        if progress := self.stage.progress(self.step):
            return f"in step {self.step + 1}{of} {progress}"
        if self.stage.is_done(self.step):
            return f"after step {self.step}{of}, before the result was measured"
        return f"in step {self.step + 1}{of}{update}"

    def _measured(self, metrics: Metrics) -> Metrics:
        """The metrics of a step, with its seconds, speed and memory; every rank must call it."""
        spent = self.timer.step_seconds()
        seconds = step_seconds(spent)
        # FLOPs spent in training since the last step, this rank's share.
        flops = 0.0
        for model in self.stage.models:
            # Copies (reference, average) are not trained, and the counter starts anew for every step.
            if isinstance(model, Model):
                flops += model.flops
                model.flops = 0.0
        platform = self.model.platform
        use = Use(peak_memory_bytes(platform), flops, working_seconds(spent))
        peak = peak_tflops(platform, self.model.architecture.dtype)
        speed = throughput(metrics.get("rollout/tokens"), seconds)
        return metrics | seconds | speed | use_of_ranks(from_all_ranks(lambda: use), seconds, peak)

    def total_seconds(self) -> Metrics:
        """Wall-clock seconds of the whole run by phase, summed over all its starts."""
        now = {name: spent.wall for name, spent in self.timer.totals().items()}
        names = [*self._seconds_before, *(name for name in now if name not in self._seconds_before)]
        return {name: round(self._seconds_before.get(name, 0.0) + now.get(name, 0.0), 2) for name in names}

    def finish(self, achieved: dict[str, Any]) -> None:
        """Records the result of the run, with its layout, size and versions; exports the policy if configured."""
        # Exported here and not in the loop of steps, so that the model card has the final results.
        if self.exporter and self.config.export_every:
            self._export(self.exporter)
        self.recorder.finish(self._summary() | {"status": "completed"} | achieved)

    def _summary(self) -> dict[str, Any]:
        """Fields of the summary common to all runs; every rank must call it."""
        topology = self.model.topology
        return {
            "steps": self.step,
            "seconds": self.total_seconds(),
            "layout": asdict(self.layout) | {"dp": topology.dp_size},
            "world_size": topology.world_size,
            "parameters": self.model.parameters(),
            "versions": versions(),
        }

    # Checkpoints.

    @property
    def newest(self) -> Path | None:
        """The newest complete checkpoint."""
        return self.checkpoints.newest

    @property
    def _is_last(self) -> bool:
        return self.stage is self.stages[-1]

    def save(self, wait: bool = True) -> None:
        """Writes a checkpoint of the whole run, unless the newest has the same step and updates.

        Without `wait`, the checkpoint is written in the background while training continues.
        """
        # Completes a checkpoint in the background first: only then is `newest` up to date for the comparison below.
        self.checkpoints.finish()
        earlier = None if self._is_last else (self.stages.index(self.stage) + 1, self.stage.name)
        # A stop right after a checkpoint finds the same path and writes nothing; a step in progress has another path,
        # with the number of its updates.
        path = checkpoint.step_path(self.checkpoints.folder, self.step, self.stage.in_progress, earlier)
        if path != self.newest:
            unfinished = self.stage.in_progress, self.stage.in_flight
            self.checkpoints.save(path, self.stage.models, self.state_dict(), *unfinished, wait)

    def resume(self) -> bool:
        """Resumes from the newest checkpoint of the run directory, or of `run.fork`; returns False when there is none.

        Raises:
            InputError: All checkpoints are damaged, or the newest one's stage is not in this run.
        """
        newest = self.checkpoints.find(self.recorder)
        if newest is None:
            return False
        self.stage = self._stage_of(newest)
        # The optimizer must exist before its state can be loaded.
        self.stage.prepare()
        # Timed separately from the verification in `find`: every phase starts with a heartbeat, and both may take
        # minutes.
        with self.timer("checkpoint"):
            state = checkpoint.load(newest, self.stage.models)
        self.load_state_dict(state)
        # After `load_state_dict`, which sets the step that reseeding depends on.
        random_state.load(newest, self.config.seed, self.step)
        self.stage.in_progress = step_in_progress.load(newest, self.model.topology)
        self._resume_in_flight(newest)
        self.begun = True
        of = "" if self._is_last else f" of {self.stage.name}"
        where = self.where() if self.stage.in_progress else f"after step {self.step}{of}"
        self.recorder.note(f"continuing {where}, from {newest}")
        if self._is_last and self.stage.is_done(self.step):
            fix = "a larger run.steps continues the run, another run.name begins a new one"
            self.recorder.note(f"nothing is left to train: {fix}")
        self.recorder.open_metrics(self.step, self._metrics_file, self.stage.most_steps)
        return True

    def _resume_in_flight(self, newest: Path) -> None:
        """Gives the stage the samples that were in flight when the checkpoint was written."""
        saved = in_flight.load(newest, self.model.topology)
        # A fork may have other limits, group sizes and rewards, with which the samples could not go on.
        if saved and newest.parent != self.checkpoints.folder:
            self.recorder.note(f"{len(saved.groups)} groups in flight in {newest} are dropped: this run is a fork")
            saved = replace(saved, groups={}, samples={})
        if saved and self.stage.in_flight is not None:
            self.stage.in_flight = saved

    @property
    def _metrics_file(self) -> str:
        return METRICS if self._is_last else f"{self.stage.name}.jsonl"

    def _stage_of(self, path: Path) -> Stage:
        name = checkpoint.stage_of(path) or self.stages[-1].name
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise InputError(
            f"the checkpoint {path}",
            f"it is of the stage {name}, but the stages of this run are {', '.join(s.name for s in self.stages)}",
            "configure that stage again, or choose a different run.name",
        )

    def state_dict(self) -> dict[str, Any]:
        """State needed to resume, besides tensors and random generators; sampling depends on counters only."""
        return {
            "step": self.step,
            "updates": self.model.updates,
            "seconds": self.total_seconds(),
            "versions": versions(),
            "stage": self.stage.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state of `state_dict`. Raises InputError when an older version of this program wrote it."""
        if "updates" not in state:
            raise InputError(
                f"the checkpoints of {self.checkpoints.folder}",
                "an older version of grpo_mega wrote them",
                "choose a different run.name; base.train=false run.init_from=CHECKPOINT starts from their weights",
            )
        self.step, self._seconds_before = state["step"], state["seconds"]
        self.model.updates = state["updates"]
        self.stage.load_state_dict(state["stage"])
        warn_of_other_versions(state["versions"])


def is_due(every: int, step: int) -> bool:
    """Whether `step` is a multiple of `every`; never if `every` is 0."""
    return every > 0 and step % every == 0
