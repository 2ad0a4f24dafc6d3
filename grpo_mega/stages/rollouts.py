"""From prompts to scored answers: the engine generates, the reward scores, each as a phase of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from grpo_mega.config.schema import Config
from grpo_mega.models.topology import Topology
from grpo_mega.observe.timer import PhaseTimer
from grpo_mega.rollout.engine import Engine, SamplingParams
from grpo_mega.run import Metrics, Run
from grpo_mega.stages.batches import longest_completion
from grpo_mega.stages.metrics import average
from grpo_mega.types import Group, Prompt, Sample

Scored = tuple[float, dict[str, float]]
"""Total reward of a sample, and the unweighted value of every term."""
InTurn = Callable[[int, str, Callable[[], list[Sample]]], list[Sample]]
"""(policy version, phase, work): does the work with an engine that has the weights of this version, and measures it."""


class Rollouts:
    """Scored answers of the policy to prompts."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        in_turn: InTurn,
        score: Callable[[list[Sample]], list[Scored]],
        topology: Topology,
        stop_ids: tuple[int, ...],
        traffic: Callable[[], Metrics] = dict,
    ) -> None:
        """`score` scores samples on one rank; `traffic` says what was moved between trainer and engine since last."""
        self.config = config.rollout
        self._success = config.reward.success
        self.engine = engine
        self.traffic = traffic
        self.in_turn = in_turn
        self._score = score
        self._topology = topology
        self._sampling = SamplingParams(
            max_new_tokens=config.rollout.max_new_tokens,
            stop_ids=stop_ids,
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            top_k=config.rollout.top_k,
            seed=config.run.seed,
        )

    def sampling(self, step: int) -> SamplingParams:
        """How completions are sampled after so many steps."""
        return replace(self._sampling, max_new_tokens=longest_completion(self.config, step))

    def groups(self, run: Run, prompts: list[Prompt], group_size: int) -> list[Group]:
        """A group of scored samples for every prompt; the same on every rank."""
        samples = self.samples(run, "generate", prompts, group_size, run.step)
        with run.phase("reward"):
            return self.scored_groups(samples, group_size)

    def evaluate(self, run: Run, split: str, prompts: list[Prompt], step: int) -> Metrics:
        """Mean of every term and of the length over one sampled answer per prompt, after `step` steps; also reported.

        Raises:
            Interrupted: A signal arrived in the meantime; it can be done again with the same result.
        """
        with run.undone_if_stopped():
            samples = self.samples(run, "evaluate", prompts, 1, step)
            with run.phase("evaluate"):
                scores = self.scores(samples)
        terms = {name: average(values[name] for _, values in scores) for name in scores[0][1]}
        metrics = {"accuracy": terms.pop(self._success), **terms, "length": average(len(s.token_ids) for s in samples)}
        run.recorder.evaluation(step, split, metrics)
        return metrics

    def samples(self, run: Run, phase: str, prompts: list[Prompt], group_size: int, step: int) -> list[Sample]:
        """Samples of the policy after `step` steps; an engine with weights of its own gets them before.

        Raises:
            Interrupted: A signal arrived in the meantime.
        """
        run.raise_if_stopping()

        def work() -> list[Sample]:
            return self.engine.generate(prompts, group_size, self.sampling(step), step, run.is_asked_to_stop)

        return self.in_turn(step, phase, work)

    def scored_groups(self, samples: Sequence[Sample], group_size: int) -> list[Group]:
        """The samples with their rewards, group by group."""
        scores = self.scores(samples)
        groups = []
        for i in range(0, len(samples), group_size):
            totals, terms = zip(*scores[i : i + group_size], strict=True)
            components = {name: tuple(t[name] for t in terms) for name in terms[0]}
            groups.append(Group(tuple(samples[i : i + group_size]), totals, components))
        return groups

    def scores(self, samples: Sequence[Sample]) -> list[Scored]:
        """Total reward and terms of every sample; each sample is scored by one rank alone, for all."""
        return self._topology.spread_over_ranks(samples, lambda mine: self._score(list(mine)))


def without_turns(timer: PhaseTimer, version: int, phase: str, work: Callable[[], list[Sample]]) -> list[Sample]:
    """The `InTurn` of an engine that generates with the trainer's own weights."""
    with timer(phase):
        return work()
