"""A reward model's score as a term of the reward, and the alarm for a policy that learns to please it alone.

A process reward model scores steps (`algorithm/step_scores.py`): rewards of steps for process supervision, of which the
score of the whole answer is made.

DeepSeekMath (arXiv 2402.03300, section 4.1) learns from a reward model; DeepSeek-R1 (arXiv 2501.12948) mixes preference
rewards into the last 400 steps only, because longer training led to reward hacking.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from grpo_mega.algorithm.step_scores import outcome_of_steps
from grpo_mega.config.schema import Config
from grpo_mega.config.schema.reward import LEARNED
from grpo_mega.evaluate.measure import ACCURACY
from grpo_mega.models.scalar import ScalarModel
from grpo_mega.models.topology import Topology
from grpo_mega.platform.collectives import succeed_together
from grpo_mega.run import Metrics
from grpo_mega.stages.batches import batch_of_all
from grpo_mega.stages.reward_model import Scale
from grpo_mega.step_ends import Decode, step_tokens
from grpo_mega.types import Answer, Batch, Rollout

logger = logging.getLogger(__name__)

FALL = 0.1
"""What success may fall below the best evaluation's before a higher learned reward counts as hacking: three standard
errors of a success of one half on 200 problems."""


@dataclass(frozen=True)
class Learned:
    """What a reward model says of an answer.

    Attributes:
        value: Of the whole.
        steps: (index of its last token in the completion, its score) of each step; () by a model of whole answers.
    """

    value: float
    steps: tuple[tuple[int, float], ...] = ()


ScoresOf = Callable[[Rollout, Batch], list[Learned]]
"""(answers, this replica's part of all of them) -> what is said of each, on every rank; every rank must call it."""


@dataclass(frozen=True)
class WholeScores:
    """The scores of a reward model of whole answers, read at their last tokens.

    Attributes:
        model: The model.
        scale: What their mean is subtracted of, and their deviation divided by; None for scores as they are.
    """

    model: ScalarModel
    scale: Scale | None

    def __call__(self, rollout: Rollout, batch: Batch) -> list[Learned]:
        """See `ScoresOf`."""
        scores = self.model.scores(batch, sum(1 for _ in rollout.answers))
        if self.scale is not None:
            scores = (scores - self.scale.mean) / self.scale.std
        return [Learned(score) for score in scores.tolist()]


@dataclass(frozen=True)
class StepScores:
    """The probabilities of a process reward model that steps are right, read at their last tokens.

    Attributes:
        model: The model.
        separators: What divides steps, as the model learned it (`step_ends`).
        outcome: What steps say of the whole: one of `OUTCOMES`.
        decode: Token ids -> the text of a completion.
    """

    model: ScalarModel
    separators: Sequence[str]
    outcome: str
    decode: Decode

    def __call__(self, rollout: Rollout, batch: Batch) -> list[Learned]:
        """See `ScoresOf`. The value of an answer without tokens is 0, of one with a score that is not finite, NaN."""
        answers = [(len(group.prompt.token_ids), answer) for group in rollout.groups for answer in group.answers]
        ends: list[list[int]] = []
        numbers = enumerate(batch.numbers.tolist())
        succeed_together(lambda: ends.extend(self._ends(batch, i, answers[number][1]) for i, number in numbers))
        mask = torch.zeros_like(batch.mask)
        mask[torch.tensor([token for of_sequence in ends for token in of_sequence], dtype=torch.int64)] = True
        found = self.model.masked_scores(batch.with_(mask=mask))
        return [self._learned(found[number], prompt) for number, (prompt, _) in enumerate(answers)]

    def _ends(self, batch: Batch, sequence: int, answer: Answer) -> list[int]:
        """The tokens of the batch that end the steps of one of its sequences."""
        first, end = batch.cu_seqlens[sequence : sequence + 2].tolist()
        ids = batch.tokens[first:end][batch.mask[first:end]].tolist()
        if not ids:
            return []
        text = self.decode(ids[:-1] if answer.finish_reason == "stop" else ids)
        return [end - len(ids) + token for token in step_tokens(text, ids, self.decode, self.separators)]

    def _learned(self, scores: Sequence[tuple[int, float]], prompt: int) -> Learned:
        """What these scores, at tokens of prompt and completion, say."""
        values = torch.tensor([score for _, score in scores], dtype=torch.float64)
        if not values.isfinite().all():
            return Learned(math.nan)
        right = torch.sigmoid(values).tolist()
        steps = tuple((token - prompt, each) for (token, _), each in zip(scores, right, strict=True))
        return Learned(outcome_of_steps(right, self.outcome) if right else 0.0, steps)


class LearnedReward:
    """Adds a reward model's scores to those of answers."""

    def __init__(self, config: Config, topology: Topology, scores_of: ScoresOf, checksum: str) -> None:
        """Scores by a model that no run trains. The `checksum` tells its weights from others."""
        self.checksum = checksum
        self._config, self._settings = config, config.reward.model
        self._topology, self._scores_of = topology, scores_of
        self._by_step = config.algorithm.supervision == "process"
        self._counting = {term.name for term in config.reward.terms if term.weight}

    def is_due(self, step: int) -> bool:
        """Whether answers of the policy after `step` steps are learned from by their scores, too."""
        return step >= self._settings.from_step

    def added(self, rollout: Rollout) -> Rollout:
        """The answers with the term `model`, and with `weight` times it in their totals; every rank must call it.

        With process supervision the scores of steps, times `weight`, are added to the rewards of steps. An answer that
        other terms could not score stays without a score.

        Raises:
            FloatingPointError: A score is not finite; names the sample.
        """
        batch = batch_of_all(rollout, self._config, self._topology)
        learned = iter(self._scores_of(rollout, batch))
        groups = []
        for group in rollout.groups:
            prompt = group.prompt.id
            answers = [self._scored(answer, next(learned), prompt, i) for i, answer in enumerate(group.answers)]
            groups.append(replace(group, answers=tuple(answers)))
        return Rollout(groups, rollout.samples)

    def _scored(self, answer: Answer, learned: Learned, prompt: str, index: int) -> Answer:
        value, score = learned.value, answer.score
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the reward model's score of prompt {prompt!r}, sample {index} is {value}; its weights overflow: take "
                "an earlier checkpoint of it in reward.model.path, or train it with a lower pairs.lr"
            )
        if score.unscorable:
            return answer
        total = score.total + self._settings.weight * value
        steps = self._steps(answer, learned) if self._by_step else score.steps
        return replace(answer, score=replace(score, total=total, terms=score.terms | {LEARNED: value}, steps=steps))

    def _steps(self, answer: Answer, learned: Learned) -> tuple[tuple[int, float], ...]:
        """The rewards of steps of all terms and the model's; terms without steps count as one that ends the answer."""
        others = answer.score.steps
        if not others and self._counting & answer.score.terms.keys():
            others = ((max(0, answer.length - 1), answer.score.total),)
        rewards = dict(others)
        for token, value in learned.steps:
            rewards[token] = rewards.get(token, 0.0) + self._settings.weight * value
        return tuple(sorted(rewards.items()))


class HackingAlarm:
    """Compares each evaluation with the best earlier one: a policy that games its reward model raises the learned
    reward while it solves fewer problems (overoptimization: Gao et al., 2022, arXiv 2210.10760).

    Attributes:
        best: The success and the learned reward of the evaluation with the highest success so far.
    """

    def __init__(self, reward_model: str = "") -> None:
        """Before the first evaluation by the reward model with this checksum."""
        self._reward_model = reward_model
        self.best: tuple[float, float] | None = None

    def heard(self, measured: Metrics) -> Metrics:
        """Takes an evaluation; its metric `hacking`, 1 with a warning or 0; {} where one of the numbers is missing."""
        if ACCURACY not in measured or LEARNED not in measured:
            return {}
        success, learned = measured[ACCURACY], measured[LEARNED]
        if self.best is None or success > self.best[0]:
            self.best = success, learned
            return {"hacking": 0.0}
        hacking = success <= self.best[0] - FALL and learned > self.best[1]
        if hacking:
            logger.warning(
                "the policy may be gaming the reward model: the learned reward has risen from %.3f to %.3f since the "
                "best evaluation, while the success has fallen from %.1f%% to %.1f%%. Lower reward.model.weight, raise "
                "algorithm.kl_coef, train the reward model on pairs of what the policy answers now, or go back to an "
                "earlier checkpoint; samples/ shows what it is fond of",
                self.best[1],
                learned,
                100 * self.best[0],
                100 * success,
            )
        return {"hacking": float(hacking)}

    def state_dict(self) -> dict[str, Any]:
        """The best evaluation, and what scored it, for a checkpoint."""
        return {"best": self.best, "reward_model": self._reward_model}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state of `state_dict`. Raises ValueError when another reward model scores now."""
        if state["reward_model"] != self._reward_model:
            raise ValueError(
                "reward.model.path holds another reward model than the run began with (SHA-256 of its manifest "
                f"{self._reward_model[:12]}..., it was {state['reward_model'][:12]}...): name the checkpoint that it "
                "was, or give this run another run.name"
            )
        self.best = (state["best"][0], state["best"][1]) if state["best"] else None
