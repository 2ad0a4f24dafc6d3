"""From prompts to scored answers: the engine generates, the reward scores, each as a phase of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from grpo_mega.config.schema import Config
from grpo_mega.models.topology import Topology
from grpo_mega.observe.timer import PhaseTimer
from grpo_mega.rollout.engine import Engine, SamplingParams
from grpo_mega.rollout.producer import Producer
from grpo_mega.run import Metrics, Run
from grpo_mega.stages.batches import longest_completion
from grpo_mega.stages.metrics import average, mean_terms
from grpo_mega.types import Group, Prompt, Sample, Score

InTurn = Callable[[int, str, Callable[[], list[Group]]], list[Group]]
"""(policy version, phase, work): does the work with an engine that has the weights of this version, and measures it."""


class Rollouts:
    """Scored answers of the policy to prompts."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        in_turn: InTurn,
        score: Callable[[list[Sample]], list[Score]],
        topology: Topology,
        stop_ids: tuple[int, ...],
        generates_meanwhile: bool = False,
        traffic: Callable[[], Metrics] = dict,
    ) -> None:
        """How prompts become scored answers.

        Args:
            config: The whole configuration.
            engine: What generates.
            in_turn: How it comes to the policy's weights, and to its turn.
            score: Scores samples on one rank.
            topology: Shares samples out over ranks.
            stop_ids: Tokens that end a completion.
            generates_meanwhile: Whether the engine goes on while samples are scored; else they are scored at the end.
            traffic: Says what was moved between trainer and engine since it was last asked.
        """
        self._generates_meanwhile = generates_meanwhile
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
        """A group of scored samples for every prompt; the same on every rank.

        Raises:
            Interrupted: A signal arrived in the meantime.
        """
        return self.produced(run, "generate", prompts, group_size, run.step)

    def produced(self, run: Run, phase: str, prompts: list[Prompt], group_size: int, step: int) -> list[Group]:
        """Groups of the policy after `step` steps, scored while others are generated if the engine can do that.

        An engine with weights of its own gets them before.
        """
        run.raise_if_stopping()

        def score(samples: Sequence[Sample]) -> list[Score]:
            with run.timer.instead("reward" if phase == "generate" else phase):
                return self.scores(samples)

        at_least = self._topology.world_size if self._generates_meanwhile else len(prompts) * group_size
        producer = Producer(self.engine, score, group_size, self.sampling(step), step, at_least)
        producer.add(prompts)
        return self.in_turn(step, phase, lambda: producer.run(run.is_asked_to_stop))

    def scores(self, samples: Sequence[Sample]) -> list[Score]:
        """The score of every sample; each sample is scored by one rank alone, for all."""
        return self._topology.spread_over_ranks(samples, lambda mine: self._score(list(mine)))

    def evaluate(self, run: Run, split: str, prompts: list[Prompt], step: int) -> Metrics:
        """Mean of every term and of the length over one sampled answer per prompt, after `step` steps; also reported.

        Raises:
            Interrupted: A signal arrived in the meantime; it can be done again with the same result.
        """
        with run.undone_if_stopped():
            groups = self.produced(run, "evaluate", prompts, 1, step)
        terms = mean_terms([score for group in groups for score in group.scores])
        lengths = [len(sample.token_ids) for group in groups for sample in group.samples]
        metrics = {"accuracy": terms.pop(self._success), **terms, "length": average(lengths)}
        run.recorder.evaluation(step, split, metrics)
        return metrics


def without_turns(timer: PhaseTimer, version: int, phase: str, work: Callable[[], list[Group]]) -> list[Group]:
    """The `InTurn` of an engine that generates with the trainer's own weights."""
    with timer(phase):
        return work()
