"""Training of a process reward model, which learns the correctness of each step of a completion.

As in Let's Verify Step by Step (Lightman et al., 2023, arXiv 2305.20050) and Math-Shepherd (Wang et al., 2023, arXiv
2312.08935): a language model's body with a head of one number, read at the last token of each step. Formulas:
`grpo_mega/algorithm/process_reward.py`; ends of steps: `grpo_mega/step_ends.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from grpo_mega.algorithm.process_reward import step_metrics
from grpo_mega.config.schema import OptimizerConfig, PairsConfig
from grpo_mega.data.examples import Examples
from grpo_mega.data.labelled_steps import LabelledCompletion
from grpo_mega.models.model import Pass
from grpo_mega.models.scalar import ScalarModel, cross_entropy, right_side
from grpo_mega.run import Metrics
from grpo_mega.stages.scalar_training import ScalarTraining, in_parts
from grpo_mega.types import Batch, pack_rows


class ProcessRewardModel(ScalarTraining[LabelledCompletion]):
    """Stage of updates on completions with labelled steps."""

    name = "process_reward_model"
    noun, measured_on = "completion", "step"

    def __init__(
        self,
        config: PairsConfig,
        optimizer: OptimizerConfig,
        eval_every: int,
        model: ScalarModel,
        completions: Examples[LabelledCompletion],
    ) -> None:
        """A stage that trains `model` on `completions`; see `ScalarTraining`."""
        super().__init__(config, optimizer, eval_every, model, completions)
        self.separators = [*config.separators]

    def update(self, examples: Sequence[LabelledCompletion], lr: float) -> Pass:
        """One update on the cross-entropy of all steps of the completions."""
        return step_update(self.model, examples, lr)

    def measure(self, examples: Sequence[LabelledCompletion]) -> Metrics:
        """Loss, accuracy, area under the curve and calibration error of the steps of completions."""
        return measure_steps(self.model, examples, self.config.batch_size)

    def state_dict(self) -> dict[str, Any]:
        """State shared by all reward-model training, and the separators of steps."""
        return super().state_dict() | {"separators": self.separators}


def step_update(model: ScalarModel, completions: Sequence[LabelledCompletion], lr: float) -> Pass:
    """One update on the loss of all steps of completions, which every rank has, with metrics of the steps."""
    return model.apply(step_gradients(model, completions), lr)


def step_gradients(model: ScalarModel, completions: Sequence[LabelledCompletion]) -> Pass:
    """Forward and backward pass of the mean cross-entropy over all steps of the completions, which every rank has."""
    batch = pack_completions(completions)
    weight = batch.mask / max(1, int(batch.mask.sum()))
    gradients = model.gradients(model.share(batch.with_(weight=weight)), cross_entropy, {"accuracy": right_side})
    del gradients.metrics["value"]
    return gradients


def pack_completions(completions: Sequence[LabelledCompletion]) -> Batch:
    """Packs completions: the last token of every step is masked in, with its label in the column `returns`."""
    batch = pack_rows([completion.row for completion in completions])
    labels = torch.tensor([label for completion in completions for label in completion.labels])
    return batch.with_(returns=torch.zeros(len(batch.mask)).masked_scatter(batch.mask, labels))


def scores_of(model: ScalarModel, completions: Sequence[LabelledCompletion], batch_size: int) -> torch.Tensor:
    """[S] float64 scores of the steps of any number of completions, in order, `batch_size` completions at a time."""
    scores: list[float] = []
    for part in in_parts(completions, batch_size):
        of_completions = model.masked_scores(model.share(pack_completions(part)))
        scores += [score for number in range(len(part)) for _, score in of_completions[number]]
    return torch.tensor(scores, dtype=torch.float64)


def measure_steps(model: ScalarModel, completions: Sequence[LabelledCompletion], batch_size: int) -> Metrics:
    """Metrics of the steps of one or more completions."""
    labels = torch.tensor([label for completion in completions for label in completion.labels], dtype=torch.float64)
    return step_metrics(scores_of(model, completions, batch_size), labels)
