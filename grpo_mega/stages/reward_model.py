"""Training of a reward model, which learns to score the preferred one of two responses higher.

Reward modelling as for InstructGPT (Ouyang et al., 2022, arXiv 2203.02155, section 3.5): a language model's body with a
head of one number, read at a response's last token. The formulas are in `grpo_mega/algorithm/preference.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from grpo_mega.algorithm.preference import calibration_error, preference_metrics, preference_slopes
from grpo_mega.config.schema import OptimizerConfig, PairsConfig
from grpo_mega.data.examples import Pair, Pairs, rows_of
from grpo_mega.models.model import Pass
from grpo_mega.models.scalar import ScalarModel, value_itself
from grpo_mega.run import Metrics, Run
from grpo_mega.stages.scalar_training import ScalarTraining, in_parts
from grpo_mega.types import Batch, pack_rows

SCALE_PAIRS = 2048
"""Pairs whose scores determine the normalisation: with this number, the mean is off by 2 % of a standard deviation."""


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of the scores of the learned responses, chosen and rejected together."""

    mean: float
    std: float


class RewardModel(ScalarTraining[Pair]):
    """Stage of updates on pairs; measures the scale of the scores after the last one."""

    name = "reward_model"
    noun = measured_on = "pair"

    def __init__(
        self, config: PairsConfig, optimizer: OptimizerConfig, eval_every: int, model: ScalarModel, pairs: Pairs
    ) -> None:
        """A stage that trains `model` on `pairs`; see `ScalarTraining`."""
        super().__init__(config, optimizer, eval_every, model, pairs)
        self.scale: Scale | None = None

    def update(self, examples: Sequence[Pair], lr: float) -> Pass:
        """One update on the preference loss of pairs."""
        return preference_update(self.model, examples, lr)

    def measure(self, examples: Sequence[Pair]) -> Metrics:
        """Accuracy, loss, margin and calibration error on pairs."""
        return measure_pairs(self.model, examples, self.config.batch_size)

    def after_last_update(self, run: Run) -> None:
        """Measures the scale of the scores."""
        with run.timer("reward_model"):
            self.scale = scale_of(self.model, self.learned_pairs(), self.config.batch_size)

    def learned_pairs(self) -> list[Pair]:
        """The first `SCALE_PAIRS` learned pairs."""
        steps = range(min(self.examples.steps, -(-SCALE_PAIRS // self.config.batch_size)))
        return [pair for step in steps for pair in self.examples.of_step(step)][:SCALE_PAIRS]

    def results(self) -> dict[str, Any]:
        """The scale of the scores."""
        return {} if self.scale is None else {"scores": asdict(self.scale)}

    def state_dict(self) -> dict[str, Any]:
        """State shared by all reward-model training, and the scale of the scores once it is measured."""
        return super().state_dict() | {"scale": None if self.scale is None else asdict(self.scale)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state of `state_dict`. Raises InputError when it was trained on other pairs."""
        super().load_state_dict(state)
        self.scale = Scale(**state["scale"]) if state["scale"] else None


def preference_update(model: ScalarModel, pairs: Sequence[Pair], lr: float) -> Pass:
    """One update on the preference loss of all pairs, which every rank has, with metrics of the pairs."""
    return model.apply(preference_gradients(model, pairs), lr)


def preference_gradients(model: ScalarModel, pairs: Sequence[Pair]) -> Pass:
    """Forward and backward pass of the preference loss of all pairs, which every rank has.

    All responses are scored first; then one backward pass of the sum of each score times the loss's derivative by it,
    which is the exact gradient even if the responses of a pair are computed on different ranks.
    """
    batch = model.share(pack_pairs(pairs))
    chosen, rejected = _scores(model, batch, len(pairs))
    slopes = torch.stack(preference_slopes(chosen, rejected), dim=1).flatten()  # in the order of the sequences' numbers
    weight = torch.zeros(len(batch.mask)).masked_scatter(batch.mask, slopes[batch.numbers].float())
    gradients = model.gradients(batch.with_(weight=weight), value_itself)
    del gradients.metrics["value"]
    gradients.metrics |= preference_metrics(chosen, rejected)
    return gradients


def pack_pairs(pairs: Sequence[Pair]) -> Batch:
    """Packs both responses of every pair: pair p has the sequences 2p (chosen) and 2p + 1, with their last tokens
    masked in; their common prefix may be computed once."""
    batch = pack_rows(rows_of(pairs))
    shared: list[int] = []
    for pair in pairs:
        chosen, rejected = pair.chosen.token_ids, pair.rejected.token_ids
        most = min(len(chosen), len(rejected)) - 1  # without the last token of either, which is scored
        shared += [next((i for i in range(most) if chosen[i] != rejected[i]), most)] * 2
    return batch.with_(prompts=batch.numbers // 2, prompt_lengths=torch.tensor(shared, dtype=torch.int64))


def _scores(model: ScalarModel, batch: Batch, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[P], [P] float64 scores of the chosen and the rejected responses of a batch of `pack_pairs`."""
    chosen, rejected = model.scores(batch, 2 * pairs).view(-1, 2).unbind(dim=1)
    return chosen, rejected


def scores_of(model: ScalarModel, pairs: Sequence[Pair], batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[P], [P] float64 scores of the chosen and rejected responses of any number of pairs, `batch_size` at a time."""
    parts = [_scores(model, model.share(pack_pairs(part)), len(part)) for part in in_parts(pairs, batch_size)]
    chosen, rejected = zip(*parts, strict=True)
    return torch.cat(chosen), torch.cat(rejected)


def measure_pairs(model: ScalarModel, pairs: Sequence[Pair], batch_size: int) -> Metrics:
    """Accuracy, loss, margin and calibration error on one or more pairs."""
    chosen, rejected = scores_of(model, pairs, batch_size)
    return preference_metrics(chosen, rejected) | {"calibration_error": calibration_error(chosen, rejected)}


def scale_of(model: ScalarModel, pairs: Sequence[Pair], batch_size: int) -> Scale:
    """Mean and standard deviation of the scores of all responses of these pairs."""
    scores = torch.cat(scores_of(model, pairs, batch_size))
    return Scale(scores.mean().item(), scores.std(correction=0).item())
