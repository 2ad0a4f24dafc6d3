"""A reward model's score as a reward term, and the alarm for reward hacking.

A process reward model scores steps (`algorithm/process_reward.py`), for process supervision; the score of the whole
completion is computed from them.

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

from grpo_mega.algorithm.process_reward import outcome_of_steps
from grpo_mega.config.schema import RewardConfig
from grpo_mega.config.schema.reward import LEARNED
from grpo_mega.errors import InputError
from grpo_mega.evaluate.measure import ACCURACY
from grpo_mega.models.scalar import ScalarModel
from grpo_mega.models.topology import Topology
from grpo_mega.platform.collectives import succeed_together
from grpo_mega.run import Metrics
from grpo_mega.stages.exchange import ExchangeOptions
from grpo_mega.stages.reward_model import Scale
from grpo_mega.stages.step import batch_of_all
from grpo_mega.step_ends import step_tokens
from grpo_mega.types import Batch, Decode, Rollout, SampleInfo

logger = logging.getLogger(__name__)

FALL = 0.1
"""Drop of success below the best evaluation's from which a higher learned reward counts as hacking: three standard
errors of a success of one half on 200 problems."""


@dataclass(frozen=True)
class Learned:
    """A reward model's scores of one sample.

    Attributes:
        value: Score of the whole completion.
        steps: (index of last token in the completion, score) of each step; () for a model of whole completions.
    """

    value: float
    steps: tuple[tuple[int, float], ...] = ()


ScoresOf = Callable[[Rollout, Batch], list[Learned]]
"""(samples, this replica's share of them) -> scores of each sample, on every rank; every rank must call it."""


@dataclass(frozen=True)
class WholeScores:
    """Scores of a reward model of whole completions, read at their last tokens: of one in pieces it sees the last.

    Attributes:
        model: The reward model.
        scale: Mean and standard deviation to normalise scores with; None for raw scores.
    """

    model: ScalarModel
    scale: Scale | None

    def __call__(self, rollout: Rollout, batch: Batch) -> list[Learned]:
        """Scores of the samples; see `ScoresOf`."""
        scores = self.model.scores(batch, sum(1 for _ in rollout.infos))
        if self.scale is not None:
            scores = (scores - self.scale.mean) / self.scale.std
        return [Learned(score) for score in scores.tolist()]


@dataclass(frozen=True)
class StepScores:
    """Scores of a process reward model: probabilities that steps are correct, read at their last tokens.

    Attributes:
        model: The process reward model.
        separators: Separators of steps with which the model was trained (`step_ends`).
        outcome: How step scores become the completion's score: see `outcome_of_steps`.
        decode: Decodes token ids to the text of a completion.
    """

    model: ScalarModel
    separators: Sequence[str]
    outcome: str
    decode: Decode

    def __call__(self, rollout: Rollout, batch: Batch) -> list[Learned]:
        """Scores of the samples, see `ScoresOf`: 0 for one without tokens, NaN if a score is not finite."""
        infos = [(len(group.prompt.token_ids), info) for group in rollout.groups for info in group.infos]
        ends: list[list[int]] = []
        numbers = enumerate(batch.numbers.tolist())
        succeed_together(lambda: ends.extend(self._ends(batch, i, infos[number][1]) for i, number in numbers))
        mask = torch.zeros_like(batch.mask)
        mask[torch.tensor([token for of_sequence in ends for token in of_sequence], dtype=torch.int64)] = True
        scores = self.model.masked_scores(batch.with_(mask=mask))
        learned = []
        for number, (prompt, _) in enumerate(infos):
            # Step scores at tokens of prompt and completion.
            values = torch.tensor([score for _, score in scores[number]], dtype=torch.float64)
            if not values.isfinite().all():
                learned.append(Learned(math.nan))
                continue
            right = torch.sigmoid(values).tolist()
            steps = tuple((token - prompt, each) for (token, _), each in zip(scores[number], right, strict=True))
            learned.append(Learned(outcome_of_steps(right, self.outcome) if right else 0.0, steps))
        return learned

    def _ends(self, batch: Batch, sequence: int, info: SampleInfo) -> list[int]:
        """Indices in the batch of the sampled tokens that end the steps of one of its sequences."""
        end = int(batch.cu_seqlens[sequence + 1])
        first = end - info.length
        ids = batch.tokens[first:end].tolist()
        if not ids:
            return []
        text = self.decode(ids[:-1] if info.finish_reason == "stop" else ids)
        ends = (first + token for token in step_tokens(text, ids, self.decode, self.separators))
        return [token for token in ends if batch.mask[token]]


class LearnedReward:
    """Adds a reward model's scores to the scores of samples."""

    def __init__(
        self,
        config: RewardConfig,
        by_step: bool,
        exchange: ExchangeOptions,
        topology: Topology,
        scores_of: ScoresOf,
        checksum: str,
    ) -> None:
        """`scores_of` computes scores by a frozen model, whose weights `checksum` identifies.

        With `by_step` (process supervision) its scores of steps are added as well.
        """
        self.checksum = checksum
        self._settings, self._by_step = config.model, by_step
        self._exchange, self._topology, self._scores_of = exchange, topology, scores_of
        self._counting = {term.name for term in config.terms if term.weight}

    def is_due(self, step: int) -> bool:
        """Whether scores count in training after `step` steps."""
        return step >= self._settings.from_step

    def added(self, rollout: Rollout) -> Rollout:
        """The samples with the term `model`, and `weight` times it added to their totals; every rank must call it.

        With process supervision step scores, times `weight`, are added to the step rewards. A sample that other terms
        could not score stays unscored.

        Raises:
            FloatingPointError: A score is not finite; names the sample.
        """
        batch = batch_of_all(rollout, self._exchange, self._topology)
        learned = iter(self._scores_of(rollout, batch))
        groups = []
        for group in rollout.groups:
            prompt = group.prompt.id
            infos = [self._scored(info, next(learned), prompt, i) for i, info in enumerate(group.infos)]
            groups.append(replace(group, infos=tuple(infos)))
        return Rollout(groups, rollout.samples)

    def _scored(self, info: SampleInfo, learned: Learned, prompt: str, index: int) -> SampleInfo:
        value, score = learned.value, info.score
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the reward model's score of prompt {prompt!r}, sample {index} is {value}: its weights overflow; set "
                "reward.model.path to an earlier checkpoint, or train it with a lower pairs.lr"
            )
        if score.unscorable:
            return info
        steps = score.steps
        if self._by_step:
            rewards = dict(steps)
            if not steps and self._counting & score.terms.keys():  # terms without steps: one step at the sample's end
                rewards = {max(0, info.length - 1): score.total}
            for token, of_step in learned.steps:
                rewards[token] = rewards.get(token, 0.0) + self._settings.weight * of_step
            steps = tuple(sorted(rewards.items()))
        total, terms = score.total + self._settings.weight * value, score.terms | {LEARNED: value}
        return replace(info, score=replace(score, total=total, terms=terms, steps=steps))


class HackingAlarm:
    """Alarm for reward hacking: compares each evaluation with the best earlier one, as a policy that games its reward
    model raises the learned reward while it solves fewer problems (overoptimization: Gao et al., 2022, arXiv
    2210.10760).

    Attributes:
        best: Success and learned reward of the evaluation with the highest success so far.
    """

    def __init__(self, reward_model: str = "") -> None:
        """Starts without evaluations; `reward_model` is the checksum of the scoring model."""
        self._reward_model = reward_model
        self.best: tuple[float, float] | None = None

    def heard(self, measured: Metrics) -> Metrics:
        """Records an evaluation; returns the metric `hacking`, 1 (with a warning) or 0; {} if a number is missing."""
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
                "algorithm.kl_coef, train the reward model on pairs of what the policy writes now, or go back to an "
                "earlier checkpoint; samples/ shows what it rewards",
                self.best[1],
                learned,
                100 * self.best[0],
                100 * success,
            )
        return {"hacking": float(hacking)}

    def state_dict(self) -> dict[str, Any]:
        """The best evaluation and the checksum of its reward model, for a checkpoint."""
        return {"best": self.best, "reward_model": self._reward_model}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state of `state_dict`. Raises InputError for a different reward model."""
        if state["reward_model"] != self._reward_model:
            raise InputError(
                "reward.model.path",
                f"the SHA-256 of its manifest is {self._reward_model[:12]}..., but this run began with a reward model "
                f"of {state['reward_model'][:12]}...",
                "name the checkpoint that the run began with, or choose a different run.name",
            )
        self.best = (state["best"][0], state["best"][1]) if state["best"] else None
