"""Rollouts: the engine generates answers to prompts and the reward scores them, each as a phase of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from grpo_mega.algorithm.step_advantages import groups_with_signal
from grpo_mega.config.schema import Config
from grpo_mega.evaluate.measure import metrics
from grpo_mega.evaluate.votes import ballot_of, votes_of
from grpo_mega.models.average import AveragedPolicy
from grpo_mega.models.policy import Policy
from grpo_mega.observe.timer import PhaseTimer
from grpo_mega.rollout.engine import Engine, SamplingParams
from grpo_mega.rollout.producer import Producer, Refill, no_refill
from grpo_mega.run import Metrics, Run
from grpo_mega.stages.learned_reward import LearnedReward
from grpo_mega.stages.step import StepOptions, longest_completion
from grpo_mega.stages.step_report import chosen_groups, records_of
from grpo_mega.step_ends import Decode
from grpo_mega.types import Group, Prompt, Rollout, Sample, Score


class EngineTurns(Protocol):
    """How an engine gets the policy's weights, and the GPU if trainer and engine take turns on it."""

    def generate(self, version: int, phase: str, work: Callable[[], Rollout]) -> Rollout:
        """The result of `work`, done while the engine has the weights of `version`, and timed as `phase`."""
        ...

    def metrics(self) -> Metrics:
        """Metrics of transfers between trainer and engine since the last call."""
        ...

    def outdate(self) -> None:
        """Called when the policy's weights change without a new version."""
        ...


@dataclass(frozen=True)
class WithoutTurns:
    """`EngineTurns` of an engine that generates with the trainer's own weights; `timer` times the run's phases."""

    timer: PhaseTimer

    def generate(self, version: int, phase: str, work: Callable[[], Rollout]) -> Rollout:
        """The result of `work`, timed as `phase`."""
        with self.timer(phase):
            return work()

    def metrics(self) -> Metrics:
        """Nothing: nothing is transferred."""
        return {}

    def outdate(self) -> None:
        """Does nothing: the weights are never out of date."""


class Rollouts:
    """Generates and scores answers of the policy to prompts.

    Attributes:
        engine, turns: The engine that generates the samples, and how it gets the policy's weights.
        score: Scores samples, on the rank that holds them.
        average: Average of the policy's weights, used in evaluations; None to evaluate the policy itself.
        reward_model: Checksum of a reward model that adds scores; empty without one.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        turns: EngineTurns,
        score: Callable[[Sequence[Sample]], Sequence[Score]],
        policy: Policy,
        stop_ids: tuple[int, ...],
        decode: Decode,
        average: AveragedPolicy | None = None,
        learned: LearnedReward | None = None,
    ) -> None:
        """Connects an engine, which generates answers of `policy`, with a reward.

        `stop_ids` end a completion, `decode` decodes token ids to text, `learned` adds a reward model's scores.
        """
        self.engine, self.score, self.average = engine, score, average
        self.reward_model = learned.checksum if learned else ""
        self.turns, self._policy, self._decode, self._learned = turns, policy, decode, learned
        self._run, self._rollout, self._evaluation = config.run, config.rollout, config.eval
        self._success, self._ballot = config.reward.success, ballot_of(config.reward)
        self._sampling = SamplingParams(
            max_new_tokens=config.rollout.max_new_tokens,
            stop_ids=stop_ids,
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            top_k=config.rollout.top_k,
            seed=config.run.seed,
        )

    def sampling(self, step: int) -> SamplingParams:
        """Sampling parameters after `step` steps."""
        return replace(self._sampling, max_new_tokens=longest_completion(self._rollout, step), draw=step)

    def evaluation_sampling(self, step: int) -> SamplingParams:
        """Sampling parameters of evaluations after `step` steps."""
        sampling, temperature, top_p = self.sampling(step), self._evaluation.temperature, self._evaluation.top_p
        return replace(
            sampling,
            temperature=sampling.temperature if temperature is None else temperature,
            top_p=sampling.top_p if top_p is None else top_p,
        )

    def answers(self, run: Run, prompts: list[Prompt], group_size: int, refill: Refill = no_refill) -> Rollout:
        """Scored answers to all prompts, including those that `refill` adds.

        The result is the same on every rank, except for the samples that the rank holds.

        Raises:
            Interrupted: A signal arrived in the meantime.
        """
        return self.produced(run, "generate", prompts, group_size, run.step, refill)

    def produced(
        self, run: Run, phase: str, prompts: list[Prompt], group_size: int, step: int, refill: Refill = no_refill
    ) -> Rollout:
        """Scored answers of the policy after `step` steps, timed as `phase`.

        An engine with a copy of the weights gets the policy's first.
        """
        run.raise_if_stopping()

        def scoring() -> AbstractContextManager[None]:
            return run.timer.instead("reward" if phase == "generate" else phase)

        version = self._policy.updates
        # An engine that generates meanwhile hides the scoring. Any other stands still for it: all is scored at the end.
        meanwhile = self.engine.generates_between_polls
        at_least = self._policy.topology.world_size if meanwhile else len(prompts) * group_size
        sampling = self.evaluation_sampling(step) if phase == "evaluate" else self.sampling(step)
        producer = Producer(self.engine, self.score, group_size, sampling, version, at_least, scoring, refill)
        producer.add(prompts)
        rollout = self.turns.generate(version, phase, lambda: producer.run(run.is_asked_to_stop, run.recorder.samples))
        if self._learned is None or not (phase == "evaluate" or self._learned.is_due(step)):
            return rollout
        with run.phase("reward_model" if phase == "generate" else phase):
            return self._learned.added(rollout)

    def shown(self, rollout: Rollout, signal: Sequence[bool], step: int) -> tuple[list[int], list[dict[str, Any]]]:
        """Indices of the groups of a step that samples/ shows, and on the main rank the records of their samples; see
        `step_report.py`."""
        chosen = chosen_groups(signal, self._run, step)
        return chosen, records_of(rollout, chosen, self._decode)

    def evaluate(self, run: Run, split: str, prompts: list[Prompt], step: int) -> Metrics:
        """Records and returns what `evaluate.measure.metrics` gives for `eval.samples` answers to each prompt.

        Raises:
            Interrupted: A signal arrived in the meantime; a second call gives the same result.
        """
        with run.undone_if_stopped(), self._evaluated_weights():
            rollout = self.produced(run, "evaluate", prompts, self._evaluation.samples, step)
            votes = None
            if self._ballot and self._evaluation.samples > 1:
                with run.phase("evaluate"):
                    votes = votes_of(rollout, self._ballot)
            followed = self._run.followed_problems if split == "validation" else 0
            records = records_of(rollout, range(min(followed, len(rollout.groups))), self._decode)
        measured = metrics(rollout.groups, votes, self._success)
        run.recorder.evaluation(step, split, measured, records)
        return measured

    def follow(self) -> None:
        """Updates the average, if there is one, after an update of the policy."""
        if self.average:
            self.average.follow()

    def traffic(self) -> Metrics:
        """Metrics of transfers between trainer and engine since the last call."""
        return self.turns.metrics()

    @contextmanager
    def _evaluated_weights(self) -> Iterator[None]:
        """Context in which the policy has the weights to evaluate: their average, if there is one."""
        if self.average is None:
            yield
            return
        try:
            with self.average.swapped_in():
                self.turns.outdate()
                yield
        finally:
            self.turns.outdate()


def refill_of(options: StepOptions, take: Callable[[int], list[Prompt]]) -> Refill:
    """The refill rule of one step's prompts during generation; `take` gives the next n prompts."""
    return Refilling(options, take) if options.algorithm.groups_without_signal == "refill" else no_refill


class Refilling:
    """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): adds a prompt for every group without signal, up to
    `refill_limit` times the step's prompts.

    So a step uses the shortest prefix of the prompt order in which `prompts_per_step` prompts have signal, or the
    limit: the same prompts whichever groups are complete first.
    """

    def __init__(self, options: StepOptions, take: Callable[[int], list[Prompt]]) -> None:
        """State before the first group of a step."""
        algorithm = options.algorithm
        self._left = (algorithm.refill_limit - 1) * algorithm.prompts_per_step
        self._options, self._take = options.advantages, take

    def __call__(self, groups: Sequence[Group]) -> list[Prompt]:
        """Prompts to add for these groups."""
        number = min(groups_with_signal(groups, self._options).count(False), self._left)
        self._left -= number
        return self._take(number)
