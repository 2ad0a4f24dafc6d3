"""From prompts to all their samples, or to scored groups: what is asked of an engine, and what comes of it.

Everything here is for all ranks together, and the same on each of them.
"""

from __future__ import annotations

from collections.abc import Callable

from grpo_mega.rollout.contract import EngineError
from grpo_mega.rollout.engine import Engine, SamplingParams
from grpo_mega.rollout.pool import Pool
from grpo_mega.types import Sample


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
