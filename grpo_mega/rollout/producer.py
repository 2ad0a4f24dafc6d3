"""From prompts to all their samples, or to scored groups: what is asked of an engine, and what comes of it.

Everything here is for all ranks together, and the same on each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from grpo_mega.rollout.contract import EngineError
from grpo_mega.rollout.engine import Engine, SamplingParams
from grpo_mega.rollout.pool import Pool
from grpo_mega.types import Group, Prompt, Sample, Score


class Producer:
    """Prompts in, scored groups out: in the order of the prompts, whichever group finishes first.

    A group is scored between two polls, as soon as it is complete; an engine with processes of its own generates
    meanwhile. Each sample is scored once, also when polls raise in between: after `Interrupted`, or after
    `EngineRestarted` once the weights are pushed, the producer continues with what is missing.
    """

    def __init__(
        self,
        engine: Engine,
        score: Callable[[Sequence[Sample]], Sequence[Score]],
        group_size: int,
        sampling: SamplingParams,
        version: int,
        at_least: int = 1,
    ) -> None:
        """Nothing is wanted yet.

        Args:
            engine: An engine of which nothing is under way.
            score: Scores samples; called on every rank with the same ones, whole groups, so that ranks can share them
                out (`Topology.spread_over_ranks`). What it raises ends the run: their groups are not scored again.
            group_size: Samples per prompt.
            sampling: How to sample.
            version: Policy version; see `Engine.submit`.
            at_least: Samples that are scored together, unless there are no more: where ranks share them out, as many
                as there are ranks keep all of them busy.
        """
        self._at_least = at_least
        self._unscored: list[int] = []  # numbers of prompts whose groups are complete
        self._engine, self._score = engine, score
        self._sampling, self._version = sampling, version
        self._pool = Pool(group_size)
        self._scored: dict[int, Group] = {}  # number of the prompt -> group, of those that were not handed out
        self._handed_out = 0

    def add(self, prompts: Iterable[Prompt]) -> None:
        """Groups of these prompts are wanted, after those of all prompts before; also while some are generated."""
        self._pool.add(prompts)

    @property
    def busy(self) -> bool:
        """Whether groups are missing; on all ranks alike."""
        return not self._pool.complete

    def poll(self, interrupted: Callable[[], bool] | None = None) -> list[Group]:
        """Polls the engine once, scores what is complete by it; the groups whose turn it is now, each exactly once.

        A group's turn comes when those of all prompts before it were handed out, by this poll at the latest.

        Args:
            interrupted: Whether this rank wants generation to be given up; ranks may differ.

        Raises:
            Interrupted: One of the ranks was interrupted.
            EngineRestarted: An engine was lost; push the weights, and poll again.
            EngineError: Nothing is missing, or an engine refused, or failed.
            ValueError: There is not one score for each sample.
        """
        self._advance(interrupted)
        return self._in_turn()

    def run(self, interrupted: Callable[[], bool] | None = None) -> list[Group]:
        """Polls until no group is missing; all groups that no `poll` has brought.

        Raises the same as `poll`, and can be called again like it: no group is lost.
        """
        while self.busy:
            self._advance(interrupted)
        return self._in_turn()

    def _advance(self, interrupted: Callable[[], bool] | None) -> None:
        self._unscored += advance(self._engine, self._pool, self._sampling, self._version, interrupted)
        groups = [self._pool.group(number) for number in self._unscored]
        samples = [sample for group in groups for sample in group]
        if not samples or (self.busy and len(samples) < self._at_least):
            return
        scores = self._score(samples)
        if len(scores) != len(samples):
            raise ValueError(f"{len(samples)} samples were to be scored, and there are {len(scores)} scores")
        following = iter(scores)
        for number, group in zip(self._unscored, groups, strict=True):
            self._scored[number] = Group(group, tuple(next(following) for _ in group))
        self._unscored = []

    def _in_turn(self) -> list[Group]:
        groups = []
        while group := self._scored.pop(self._handed_out, None):
            groups.append(group)
            self._handed_out += 1
        return groups


def generate(
    engine: Engine,
    pool: Pool,
    sampling: SamplingParams,
    version: int,
    interrupted: Callable[[], bool] | None = None,
) -> list[Sample]:
    """All samples of a pool, prompt by prompt, those that are not done generated with the policy of `version`.

    Args:
        engine: An engine of which nothing is under way.
        pool: What is wanted. Whatever is raised, it keeps what was handed out: called again with it, nothing of that is
            generated anew.
        sampling: How to sample.
        version: Policy version; see `Engine.submit`.
        interrupted: Whether this rank wants generation to be given up; asked before every poll.

    Raises:
        Interrupted: One of the ranks was interrupted.
        EngineRestarted: An engine was lost; push the weights, and call this again.
        EngineError: An engine refused, or failed.
    """
    while not pool.complete:
        advance(engine, pool, sampling, version, interrupted)
    return pool.samples()


def advance(
    engine: Engine, pool: Pool, sampling: SamplingParams, version: int, interrupted: Callable[[], bool] | None
) -> list[int]:
    """Submits what is waiting in the pool and polls once; numbers of the groups that are complete by it, ascending.

    Raises:
        Interrupted: See `generate`, like the others; what was in flight is waiting again.
    """
    if engine.busy and not pool.in_flight:
        raise EngineError("the engine is generating for somebody else; poll for those samples, or abort() first")
    if wanted := pool.waiting:
        engine.submit(wanted, sampling, version)
        pool.begin()
    try:
        return pool.take(engine.poll(interrupted is not None and interrupted()))
    except BaseException:
        pool.lose()
        raise
