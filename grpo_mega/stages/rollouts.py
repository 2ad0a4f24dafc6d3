"""Rollouts: the engine generates answers to prompts and the reward scores them, each as a phase of the run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from grpo_mega.algorithm.step_advantages import groups_with_signal
from grpo_mega.config.schema import Config
from grpo_mega.evaluate.measure import metrics
from grpo_mega.evaluate.votes import ballot_of, votes_of
from grpo_mega.models.average import AveragedPolicy
from grpo_mega.models.policy import Policy
from grpo_mega.observe.timer import PhaseTimer
from grpo_mega.rollout.engine import Engine, SamplingParams
from grpo_mega.rollout.stream import Refill, Stream, no_refill, slices_of
from grpo_mega.run import Metrics, Run
from grpo_mega.stages.learned_reward import LearnedReward
from grpo_mega.stages.step import StepOptions, longest_completion
from grpo_mega.stages.step_report import chosen_groups, records_of
from grpo_mega.step_ends import Decode
from grpo_mega.types import Group, Prompt, Rollout, Sample, Score, StreamState


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
        slices: The slices in which a step's samples are generated.
        in_flight: The samples that wait for a later step.
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
        self.slices, self.in_flight, self._options = slices_of(config), StreamState(), StepOptions.of(config)
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

    def answers(self, run: Run, take: Callable[[int], list[Prompt]]) -> Rollout:
        """Scored answers of a step: groups of the stream, to which prompts are added; `take` gives the next n of them.

        The result is the same on every rank, except for the samples that the rank holds.

        Raises:
            Interrupted: A signal arrived in the meantime; what is in flight is as it was before.
        """
        sampling, slices, algorithm = self.sampling(run.step), self.slices, self._options.algorithm
        stream = self._stream(run, "generate", algorithm.group_size)
        # A fork of a run without slices begins with the draws that follow on those of its steps.
        submitted = run.step * algorithm.prompts_per_step
        stream.load_state_dict(self.in_flight if self.in_flight.submitted else StreamState(submitted=submitted))
        # Without slices, groups without signal are replaced while others are under way.
        refill = refill_of(self._options, take) if slices.tokens is None else no_refill
        advance = partial(
            stream.advance,
            sampling,
            self._policy.updates,
            slices.tokens,
            run.is_asked_to_stop,
            run.recorder.samples,
            refill,
        )
        rollout = self._generated(run, "generate", run.step, lambda: stream.step(slices, take, self._enough, advance))
        self.in_flight = stream.state_dict()
        return rollout

    def _enough(self, groups: list[Group]) -> int | None:
        """The number of the first of these groups that a step takes; None while they are too few.

        Where groups without signal are refilled (DAPO), these are those among which `prompts_per_step` have signal, or
        `refill_limit` times as many.
        """
        algorithm, enough = self._options.algorithm, self._options.algorithm.prompts_per_step
        if algorithm.groups_without_signal != "refill":
            return enough if len(groups) >= enough else None
        signal = groups_with_signal(groups, self._options.advantages)
        most = algorithm.refill_limit * enough
        counts = range(enough, min(len(groups), most) + 1)
        return next((n for n in counts if n == most or sum(signal[:n]) >= enough), None)

    def produced(self, run: Run, phase: str, prompts: list[Prompt], group_size: int, step: int) -> Rollout:
        """Scored answers of the policy after `step` steps to these prompts, timed as `phase`.

        Raises:
            Interrupted: A signal arrived in the meantime.
        """
        sampling = self.evaluation_sampling(step) if phase == "evaluate" else self.sampling(step)
        stream = self._stream(run, phase, group_size)
        stream.add(prompts)

        def work() -> Rollout:
            stream.advance(sampling, self._policy.updates, None, run.is_asked_to_stop, run.recorder.samples)
            return stream.take()

        return self._generated(run, phase, step, work)

    def _stream(self, run: Run, phase: str, group_size: int) -> Stream:
        """An empty stream on the run's engine."""

        def scoring() -> AbstractContextManager[None]:
            return run.timer.instead("reward" if phase == "generate" else phase)

        # An engine that generates meanwhile hides the scoring. Any other stands still for it: all is scored at the end.
        at_least = self._policy.topology.world_size if self.engine.generates_between_polls else sys.maxsize
        return Stream(self.engine, self.score, group_size, at_least, scoring)

    def _generated(self, run: Run, phase: str, step: int, work: Callable[[], Rollout]) -> Rollout:
        """The result of `work`, for which the engine has the policy's weights, with a reward model's scores."""
        run.raise_if_stopping()
        rollout = self.turns.generate(self._policy.updates, phase, work)
        if self._learned is None or not (phase == "evaluate" or self._learned.is_due(step)):
            return rollout
        with run.phase("reward_model" if phase == "generate" else phase):
            return self._learned.added(rollout)

    def state_dict(self) -> StreamState:
        """The samples in flight between two steps; never changed in place."""
        return self.in_flight

    def load_state_dict(self, state: StreamState) -> None:
        """Restores a state of `state_dict`."""
        self.in_flight = state

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
        """Metrics of transfers between trainer and engine since the last call, and of what is in flight."""
        waiting = {"rollout/in_flight": self.samples_in_flight()} if self.slices.tokens else {}
        return self.turns.metrics() | waiting

    def samples_in_flight(self) -> int:
        """Number of samples that wait for a later step, unfinished ones included."""
        return sum(len(group.answers) for group in self.in_flight.groups.values())

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
