"""Rollouts: the engine generates samples of prompts and the reward scores them, each as a phase of the run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from grpo_mega.algorithm.step_advantages import groups_with_signal
from grpo_mega.checkpoint.checkpoint import steps_of
from grpo_mega.config.schema import EvalConfig, RewardConfig, RunConfig
from grpo_mega.environment.conversation import Conversation
from grpo_mega.environment.journal import FOLDER
from grpo_mega.evaluate.measure import metrics
from grpo_mega.evaluate.votes import ballot_of, votes_of
from grpo_mega.models.average import AveragedPolicy
from grpo_mega.models.policy import Policy
from grpo_mega.observe.timer import PhaseTimer
from grpo_mega.platform.stop import Interrupted
from grpo_mega.rollout.engine import Engine, SamplingParams
from grpo_mega.rollout.stream import Refill, Stream, no_refill
from grpo_mega.run import Metrics, Run
from grpo_mega.stages.learned_reward import LearnedReward
from grpo_mega.stages.step import StepOptions, longest_completion
from grpo_mega.stages.step_report import chosen_groups, records_of
from grpo_mega.types import Decode, Group, Prompt, Rollout, Sample, Score, StreamState

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class EngineAccess(Protocol):
    """How an engine gets the policy's weights, and the GPU if trainer and engine take turns on it."""

    def generate(self, version: int, phase: str, work: Callable[[], Result]) -> Result:
        """The result of `work`, done while the engine has the weights of `version`, and timed as `phase`.

        An engine that is generating keeps the weights that it has.
        """
        ...

    def metrics(self) -> Metrics:
        """Metrics of transfers between trainer and engine since the last call."""
        ...

    def outdate(self) -> None:
        """Called when the policy's weights change without a new version."""
        ...


@dataclass(frozen=True)
class DirectAccess:
    """`EngineAccess` of an engine that generates with the trainer's own weights; `timer` times the run's phases."""

    timer: PhaseTimer

    def generate(self, version: int, phase: str, work: Callable[[], Result]) -> Result:
        """The result of `work`, timed as `phase`."""
        with self.timer(phase):
            return work()

    def metrics(self) -> Metrics:
        """Nothing: nothing is transferred."""
        return {}

    def outdate(self) -> None:
        """Does nothing: the weights are never out of date."""


class Rollouts:
    """Generates and scores samples of the policy for prompts.

    Attributes:
        engine, access: The engine that generates the samples, and how it gets the policy's weights.
        score: Scores samples, on the rank that holds them.
        options: Settings of the steps.
        average: Average of the policy's weights, used in evaluations; None to evaluate the policy itself.
        slices: The slices in which a step's samples are generated.
        in_flight: The samples that wait for a later step, as they were when the last slice ended.
    """

    def __init__(
        self,
        options: StepOptions,
        run: RunConfig,
        evaluation: EvalConfig,
        reward: RewardConfig,
        *,
        engine: Engine,
        access: EngineAccess,
        score: Callable[[Sequence[Sample]], Sequence[Score]],
        policy: Policy,
        stop_ids: tuple[int, ...],
        decode: Decode,
        average: AveragedPolicy | None = None,
        learned: LearnedReward | None = None,
        conversation: Conversation | None = None,
    ) -> None:
        """Connects an engine, which generates samples of `policy`, with a reward.

        `run`, `evaluation` and `reward` are sections of the configuration. `stop_ids` end a completion, `decode`
        decodes token ids to text, `learned` adds a reward model's scores, an environment replies through
        `conversation`.
        """
        self.engine, self.average = engine, average
        self.score = partial(conversation.scores, score) if conversation else score
        self._conversation = conversation
        stop_ids = (*stop_ids, conversation.stop_id) if conversation else stop_ids
        self.access, self._policy, self._decode, self._learned = access, policy, decode, learned
        self.options, self.slices, self.in_flight = options, options.slices, StreamState()
        # The stream, and what continues its slice, while engines generate the slice of the next step.
        self._ahead: tuple[Stream, Callable[[], None]] | None = None
        self._run, self._rollout, self._evaluation = run, options.rollout, evaluation
        self._success, self._ballot = reward.success, ballot_of(reward)
        self._sampling = SamplingParams(
            max_new_tokens=options.rollout.max_new_tokens,
            stop_ids=stop_ids,
            temperature=options.rollout.temperature,
            top_p=options.rollout.top_p,
            top_k=options.rollout.top_k,
            seed=options.seed,
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

    def next(self, run: Run, prompts: Callable[[int], list[Prompt]]) -> Rollout:
        """Scored samples of a step: groups of the stream; `prompts` gives the next n prompts.

        The result is the same on every rank, except for the samples that the rank holds. With `rollout.ahead` the slice
        of the next step begins, which `join` ends; an engine that generates only when it is polled generates it here.

        Raises:
            Interrupted: A signal arrived in the meantime; after `load_state_dict` a second call gives the same result.
        """
        slices, algorithm, policy = self.slices, self.options.algorithm, self._policy

        def take(number: int) -> list[Prompt]:
            return self._opened(run, run.step, prompts(number))

        stream = self._stream(run, "generate", algorithm.group_size)
        # A fork of a run in which no sample outlived a step begins with the draws that follow on those of its steps.
        submitted = run.step * algorithm.prompts_per_step
        stream.load_state_dict(self.in_flight if self.in_flight.submitted else StreamState(submitted=submitted))
        # If no sample outlives the step, groups without signal are replaced while others are under way.
        refill = no_refill if slices.outlive_steps else refill_of(self.options, take)
        advance = partial(self._advance, run, stream, run.step, refill)
        rollout = self._generated(run, "generate", run.step, lambda: stream.step(slices, take, self._enough, advance))
        if slices.ahead:
            with run.phase("generate"):
                stream.fill(slices, take, self._enough)
        self.in_flight = stream.state_dict()
        if slices.ahead:
            advance = partial(self._advance, run, stream, run.step + 1, refill)
            self._ahead = stream, advance
            self.access.generate(policy.updates, "generate", partial(advance, wait=False))
            if not stream.in_slice:
                self.join()
        return rollout

    def join(self) -> None:
        """Waits for the slice that engines generate while the policy is trained, if there is one.

        Raises:
            Interrupted: A signal arrived in the meantime; `in_flight` is as it was before the slice.
        """
        if self._ahead is None:
            return
        stream, advance = self._ahead
        if stream.in_slice:
            self.access.generate(self._policy.updates, "generate", advance)
        self.in_flight, self._ahead = stream.state_dict(), None

    def _advance(self, run: Run, stream: Stream, step: int, refill: Refill, wait: bool = True) -> None:
        """Generates a slice for step `step + 1`."""
        # An engine that is generating keeps the weights that it has, also for samples that go on after a reply.
        version = self.engine.version if self.engine.busy else None
        version = self._policy.updates if version is None else version
        most = self.slices.tokens
        self._record(run, step)
        stream.advance(self.sampling(step), version, most, run.is_asked_to_stop, run.recorder.samples, refill, wait)

    def _enough(self, groups: list[Group]) -> int | None:
        """The number of the first of these groups that a step takes; None while they are too few.

        Where groups without signal are refilled (DAPO), these are those among which `prompts_per_step` have signal, or
        `refill_limit` times as many.
        """
        algorithm, enough = self.options.algorithm, self.options.algorithm.prompts_per_step
        if algorithm.groups_without_signal != "refill":
            return enough if len(groups) >= enough else None
        signal = groups_with_signal(groups, self.options.advantages)
        most = algorithm.refill_limit * enough
        counts = range(enough, min(len(groups), most) + 1)
        return next((n for n in counts if n == most or sum(signal[:n]) >= enough), None)

    def produced(self, run: Run, phase: str, prompts: list[Prompt], group_size: int, step: int) -> Rollout:
        """Scored samples of the policy after `step` steps for these prompts, timed as `phase`.

        Raises:
            Interrupted: A signal arrived in the meantime.
        """
        sampling = self.evaluation_sampling(step) if phase == "evaluate" else self.sampling(step)
        stream = self._stream(run, phase, group_size)
        # Not in `work`, which is repeated when an engine is lost.
        with run.phase(phase):
            stream.add(self._opened(run, step, prompts))

        def work() -> Rollout:
            stream.advance(sampling, self._policy.updates, None, run.is_asked_to_stop, run.recorder.samples)
            return stream.take()

        return self._generated(run, phase, step, work)

    def _opened(self, run: Run, step: int, prompts: list[Prompt]) -> list[Prompt]:
        """The prompts with what an environment adds to each problem."""
        self._record(run, step)
        return self._conversation.opened(prompts) if self._conversation and prompts else prompts

    def _record(self, run: Run, step: int) -> None:
        """Lets the environment's replies be recorded as those of the step after `step` ones."""
        if self._conversation:
            saved = steps_of(run.newest) if run.newest else 0
            folder = run.checkpoints.folder.parent / FOLDER
            self._conversation.record(folder, self._policy.topology.rank, step, saved)

    def _stream(self, run: Run, phase: str, group_size: int) -> Stream:
        """An empty stream on the run's engine."""

        def scoring() -> AbstractContextManager[None]:
            return run.timer.instead("reward" if phase == "generate" else phase)

        # An engine that generates meanwhile hides the scoring, and goes on at once with what waits for a reply, or for
        # the sample before it in its seat. Any other stands still: all is scored at the end.
        at_once = self._conversation or (self.slices.reserve and phase == "generate")
        at_least = 1 if at_once else self._policy.topology.world_size
        at_least = at_least if self.engine.generates_between_polls else sys.maxsize
        return Stream(self.engine, self.score, group_size, at_least, scoring, self._conversation)

    def _generated(self, run: Run, phase: str, step: int, work: Callable[[], Rollout]) -> Rollout:
        """The result of `work`, for which the engine has the policy's weights, with a reward model's scores."""
        run.raise_if_stopping()
        rollout = self.access.generate(self._policy.updates, phase, work)
        if self._learned is None or not (phase == "evaluate" or self._learned.is_due(step)):
            return rollout
        with run.phase("reward_model" if phase == "generate" else phase):
            return self._learned.added(rollout)

    def state_dict(self) -> StreamState:
        """The samples in flight between two steps; never changed in place."""
        return self.in_flight

    def resume(self, state: StreamState) -> None:
        """Goes on with the samples in flight of a checkpoint; episodes that cannot be rebuilt start over."""
        if self._conversation and not self._conversation.replayable:
            begun = 0
            for group in state.groups.values():
                begun += sum(one is not None and bool(one.calls) for one in group.so_far)
                group.so_far = [None if one and one.calls else one for one in group.so_far]
            if begun and self._policy.topology.is_main:
                logger.warning("environment.replayable=false: %d unfinished samples start over", begun)
        self.in_flight = state

    def load_state_dict(self, state: StreamState) -> None:
        """Restores a state of `state_dict`, and drops what is being generated."""
        self.in_flight, self._ahead = state, None
        if self.engine.busy:
            with suppress(Interrupted):
                self.engine.poll(interrupted=True)

    def shown(self, rollout: Rollout, signal: Sequence[bool], step: int) -> tuple[list[int], list[dict[str, Any]]]:
        """Indices of the groups of a step that samples/ shows, and on the main rank the records of their samples; see
        `step_report.py`."""
        chosen = chosen_groups(signal, self._run, step)
        return chosen, records_of(rollout, chosen, self._decode, self._policy.updates)

    def evaluate(self, run: Run, split: str, prompts: list[Prompt], step: int) -> Metrics:
        """Records and returns what `evaluate.measure.metrics` gives for `eval.samples` samples of each prompt.

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
            chosen = range(min(followed, len(rollout.groups)))
            records = records_of(rollout, chosen, self._decode, self._policy.updates)
        measured = metrics(rollout.groups, votes, self._success)
        run.recorder.evaluation(step, split, measured, records)
        return measured

    def follow(self) -> None:
        """Updates the average, if there is one, after an update of the policy."""
        if self.average:
            self.average.follow()

    def traffic(self) -> Metrics:
        """Metrics of transfers and calls since the last time, and of what is in flight; every rank must call it."""
        moved = self.access.metrics() | self.engine.metrics()
        moved |= self._conversation.metrics() if self._conversation else {}
        if not self.slices.outlive_steps:
            return moved
        finished = sum(info is not None for group in self.in_flight.groups.values() for info in group.infos)
        return moved | {"rollout/in_flight": self.samples_in_flight(), "rollout/waiting": finished}

    def samples_in_flight(self) -> int:
        """Number of samples that wait for a later step, unfinished ones included."""
        return sum(len(group.infos) for group in self.in_flight.groups.values())

    @contextmanager
    def _evaluated_weights(self) -> Iterator[None]:
        """Context in which the policy has the weights to evaluate: their average, if there is one."""
        if self.average is None:
            yield
            return
        try:
            with self.average.swapped_in():
                self.access.outdate()
                yield
        finally:
            self.access.outdate()


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
