"""Rollouts: the engine generates answers to prompts and the reward scores them, each as a phase of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from grpo_mega.config.schema import Config
from grpo_mega.evaluate.measure import metrics
from grpo_mega.evaluate.votes import ballot_of, votes_of
from grpo_mega.models.average import AveragedPolicy
from grpo_mega.models.policy import Policy
from grpo_mega.observe.timer import PhaseTimer
from grpo_mega.rollout.engine import Engine, SamplingParams
from grpo_mega.rollout.producer import Producer, Refill, no_refill
from grpo_mega.run import Metrics, Run
from grpo_mega.stages.batches import longest_completion
from grpo_mega.stages.learned_reward import LearnedReward
from grpo_mega.stages.shown import chosen_groups, records_of
from grpo_mega.step_ends import Decode
from grpo_mega.types import Prompt, Rollout, Sample, Score

InTurn = Callable[[int, str, Callable[[], Rollout]], Rollout]
"""(policy version, phase, work) -> result of the work, done while the engine has the weights of this version, and timed
as this phase."""


class Rollouts:
    """Generates and scores answers of the policy to prompts.

    Attributes:
        reward_model: Checksum of a reward model that adds scores; empty without one.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        in_turn: InTurn,
        score: Callable[[Sequence[Sample]], Sequence[Score]],
        policy: Policy,
        stop_ids: tuple[int, ...],
        decode: Decode,
        average: AveragedPolicy | None = None,
        generates_meanwhile: bool = False,
        traffic: Callable[[], Metrics] = dict,
        outdate: Callable[[], None] = lambda: None,
        learned: LearnedReward | None = None,
    ) -> None:
        """Connects an engine with a reward.

        Args:
            config: The whole configuration.
            engine: Generates the samples.
            in_turn: Gives the engine the policy's weights, and the GPU if trainer and engine take turns on it.
            score: Scores samples, on the rank that holds them.
            policy: The model whose answers are generated.
            stop_ids: Tokens that end a completion.
            decode: Decodes token ids to text.
            average: Average of its weights, used in evaluations; None to evaluate the policy itself.
            generates_meanwhile: Whether the engine generates while samples are scored; otherwise scoring starts after
                generation.
            traffic: Returns metrics of transfers between trainer and engine since its last call.
            outdate: Called when the policy's weights change without a new version.
            learned: Adds a reward model's scores; None without one.
        """
        self.average = average
        self._outdate, self._learned = outdate, learned
        self.reward_model = learned.checksum if learned else ""
        self._generates_meanwhile = generates_meanwhile
        self.config, self._whole, self._decode = config.rollout, config, decode
        self._evaluation = config.eval
        self._success, self._ballot = config.reward.success, ballot_of(config.reward)
        self.engine = engine
        self.traffic = traffic
        self.in_turn = in_turn
        self.score = score
        self._policy = policy
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
        return replace(self._sampling, max_new_tokens=longest_completion(self.config, step), draw=step)

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

        An engine with its own copy of the weights gets the policy's first.
        """
        run.raise_if_stopping()

        def scoring() -> AbstractContextManager[None]:
            return run.timer.instead("reward" if phase == "generate" else phase)

        version = self._policy.updates
        at_least = self._policy.topology.world_size if self._generates_meanwhile else len(prompts) * group_size
        sampling = self.evaluation_sampling(step) if phase == "evaluate" else self.sampling(step)
        producer = Producer(self.engine, self.score, group_size, sampling, version, at_least, scoring, refill)
        producer.add(prompts)

        def stopping() -> bool:
            run.recorder.samples(*producer.progress)
            return run.is_asked_to_stop()

        rollout = self.in_turn(version, phase, lambda: producer.run(stopping))
        if self._learned is None or not (phase == "evaluate" or self._learned.is_due(step)):
            return rollout
        with run.phase("reward_model" if phase == "generate" else phase):
            return self._learned.added(rollout)

    def shown(self, rollout: Rollout, step: int) -> tuple[list[int], list[dict[str, Any]]]:
        """Indices of the groups of a step that samples/ shows, and on the main rank the records of their samples; see
        `stages/shown.py`."""
        chosen = chosen_groups(rollout.groups, self._whole, step)
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
            followed = self._whole.run.followed_problems if split == "validation" else 0
            records = records_of(rollout, range(min(followed, len(rollout.groups))), self._decode)
        measured = metrics(rollout.groups, votes, self._success)
        run.recorder.evaluation(step, split, measured, records)
        return measured

    def follow(self) -> None:
        """Updates the average, if there is one, after an update of the policy."""
        if self.average:
            self.average.follow()

    @contextmanager
    def _evaluated_weights(self) -> Iterator[None]:
        """Context in which the policy has the weights to evaluate: their average, if there is one."""
        if self.average is None:
            yield
            return
        try:
            with self.average.swapped_in():
                self._outdate()
                yield
        finally:
            self._outdate()


def without_turns(timer: PhaseTimer, version: int, phase: str, work: Callable[[], Rollout]) -> Rollout:
    """`InTurn` for an engine that generates with the trainer's own weights."""
    with timer(phase):
        return work()
