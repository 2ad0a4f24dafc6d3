"""Training common to all reward models: updates, held-out metrics, checkpoint state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from grpo_mega.config.schema import OptimizerConfig, PairsConfig
from grpo_mega.data.examples import Example, Examples
from grpo_mega.errors import InputError
from grpo_mega.models.learning_rate import scheduled
from grpo_mega.models.model import Pass
from grpo_mega.models.scalar import ScalarModel
from grpo_mega.run import Metrics, Run, StepRecord, is_due
from grpo_mega.types import Step, StreamState

E = TypeVar("E", bound=Example)
Item = TypeVar("Item")


class ScalarTraining(ABC, Generic[E]):
    """Base of the stages that train a model with a scalar head, with one update per step on the step's examples.

    Attributes:
        name: Name of the stage, and prefix of its metrics.
        noun: Noun for an example.
        measured_on: Unit of the held-out metrics, as used in the names of the summary's fields.
    """

    name: str
    noun: str
    measured_on: str
    in_progress: Step | None = None
    in_flight: StreamState | None = None

    def __init__(
        self,
        config: PairsConfig,
        optimizer: OptimizerConfig,
        eval_every: int,
        model: ScalarModel,
        examples: Examples[E],
    ) -> None:
        """A stage that trains `model`, whose weights are the first ones, on the examples.

        `config` replaces learning rate and weight decay of `optimizer`; held-out examples are measured every
        `eval_every` steps.
        """
        self.config, self.eval_every = config, eval_every
        self.save_every, self.most_steps = config.save_every, examples.steps
        self.optimizer = replace(optimizer, lr=config.lr, weight_decay=config.weight_decay)
        self.model = model
        self.models = [model]
        self.examples = examples
        self.rate = scheduled(config, examples.steps)

    @abstractmethod
    def update(self, examples: Sequence[E], lr: float) -> Pass:
        """One update on examples, which every rank has; returns their metrics."""

    @abstractmethod
    def measure(self, examples: Sequence[E]) -> Metrics:
        """Metrics of one or more examples, which every rank has."""

    def after_last_update(self, run: Run) -> None:
        """Further measurements after the last update, within the last step."""

    def results(self) -> dict[str, Any]:
        """Further fields for the summary of the run."""
        return {}

    def begin(self, run: Run) -> None:
        """Starts from the model's current weights."""
        self.prepare()

    def prepare(self) -> None:
        """Creates the optimizer."""
        self.model.use_optimizer(self.optimizer)

    def step(self, run: Run) -> StepRecord:
        """One update on the examples of this step.

        Work after the update is not interrupted: a step is done completely, or not begun.
        """
        with run.phase("reward_model"):
            lr = self.rate.at(update=run.step, step=run.step)
            updated = self.update(self.examples.of_step(run.step), lr)
        metrics = {f"{self.name}/{name}": value for name, value in updated.metrics.items()}
        done = run.step + 1
        if self.examples.test and is_due(self.eval_every, done) and not self.is_done(done):
            with run.timer("evaluate"):
                measured = self.measure(self.examples.test)
            run.recorder.evaluation(done, f"held-out {self.noun}s", measured)
            metrics |= {f"eval/{name}": value for name, value in measured.items()}
        if self.is_done(done):
            self.after_last_update(run)
        return StepRecord(metrics)

    def is_done(self, steps: int) -> bool:
        """Whether the stage ends after `steps` steps."""
        return steps >= self.examples.steps

    def end(self, run: Run) -> None:
        """Measures the model on the held-out examples, and records the result of the run."""
        measured: Metrics = {}
        if self.examples.test:
            with run.phase("evaluate"):
                measured = self.measure(self.examples.test)
            run.recorder.evaluation(run.step, f"held-out {self.noun}s", measured)
        named = {f"held_out_{self.measured_on}_{name}_after": value for name, value in measured.items()}
        run.finish(named | self.results())

    def progress(self, step: int) -> str:
        """An empty text: steps of this stage are never stopped half-way."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Identity of the examples and of the tokenizer."""
        return {"pairs": self.examples.identity, "tokenizer": self.examples.tokenizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state of `state_dict`. Raises InputError when it was trained on other examples."""
        if state.get("pairs") != self.examples.identity:
            raise InputError(
                f"the {self.noun}s {self.examples.identity!r}",
                f"the saved steps of this run were on the {self.noun}s {state.get('pairs')!r}",
                "restore the files, the tokenizer and its template, or choose a different run.name",
            )


def in_parts(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """The items, `size` at a time."""
    return (items[i : i + size] for i in range(0, len(items), size))
