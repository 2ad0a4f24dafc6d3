"""Generates and scores missing samples of an evaluation in parts, so that a kill loses only the part in progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from grpo_mega.evaluate.results import Record, missing, record_of, write_part
from grpo_mega.evaluate.votes import Ballot, votes_of
from grpo_mega.platform.collectives import from_all_ranks, from_main_rank, succeed_together
from grpo_mega.rollout.engine import Engine, SamplingParams
from grpo_mega.rollout.stream import Replying, Stream
from grpo_mega.types import Prompt, Rollout, Sample, SampleInfo, Score


@dataclass(frozen=True)
class Scorer:
    """Scoring of an evaluation's samples.

    Attributes:
        score: The reward, called on the rank that holds the samples.
        success: Reward term that is reported as accuracy.
        ballot: How answers are read for votes; None without votes.
        budgets: Token budgets at which completions are cut and scored again.
        decode: Turns token ids into text.
        learned: Adds a reward model's scores to those of a rollout, on every rank; None without one.
        replying: Lets an environment reply; see `Stream`.
        opened: Adds to problems what an environment's `reset` returns; called on every rank.
    """

    score: Callable[[Sequence[Sample]], Sequence[Score]]
    success: str
    ballot: Ballot | None
    budgets: tuple[int, ...]
    decode: Callable[[Sequence[int]], str]
    learned: Callable[[Rollout], Rollout] | None = None
    replying: Replying | None = None
    opened: Callable[[Sequence[Prompt]], list[Prompt]] = list


def generate_missing(
    folder: Path,
    prompts: Sequence[Prompt],
    samples: int,
    sampling: SamplingParams,
    engine: Engine,
    scorer: Scorer,
    together: int,
    say: Callable[[str], None],
    interrupted: Callable[[], bool],
) -> None:
    """Writes a part for every `together` problems that the folder lacks; every rank must call it.

    With the embedded engine a sample is a function of the problem, its index and `sampling`, so the grouping of
    problems does not matter.

    Args:
        folder: Folder of the evaluation, opened.
        prompts: All problems.
        samples: Number of samples of each problem.
        sampling: Sampling parameters.
        engine: An engine with the weights.
        scorer: Scoring of the samples.
        together: Number of problems in a part.
        say: Called after every part, with the progress in words.
        interrupted: Whether this rank was asked to stop; ranks may differ. Called often, so it can send heartbeats.

    Raises:
        Interrupted: On every rank, when one was asked to stop; the part in progress is lost.
        RuntimeError: Some rank could not score, or the disk failed; raised on every rank.
    """
    due = from_main_rank(lambda: missing(folder, prompts))
    for first in range(0, len(due), together):
        numbers = due[first : first + together]
        records = _part(engine, [prompts[number] for number in numbers], samples, sampling, scorer, interrupted)
        write = partial(write_part, folder, numbers[0], records)
        succeed_together(write if dist.get_rank() == 0 else lambda: None)
        say(f"{len(prompts) - len(due) + first + len(numbers)} of {len(prompts)} problems")


def _part(
    engine: Engine,
    prompts: Sequence[Prompt],
    samples: int,
    sampling: SamplingParams,
    scorer: Scorer,
    interrupted: Callable[[], bool],
) -> list[Record]:
    """Records of all samples of some problems, in order, on every rank."""
    # All are scored together, unless an engine can go on with each reply.
    at_least = 1 if scorer.replying and engine.generates_between_polls else len(prompts) * samples
    stream = Stream(engine, scorer.score, samples, at_least, replying=scorer.replying)
    stream.add(scorer.opened(prompts))
    stream.advance(sampling, 0, interrupted=interrupted)
    rollout = stream.take()
    if scorer.learned:
        rollout = scorer.learned(rollout)
    ballot = scorer.ballot
    votes = [vote for of_group in votes_of(rollout, ballot) for vote in of_group] if ballot else None
    infos = [*rollout.infos]

    def held() -> dict[int, Record]:
        within = within_budgets(rollout.samples, infos, scorer)
        return {
            number: record_of(sample, infos[number], votes[number] if votes else None, within[number])
            for number, sample in rollout.samples.items()
        }

    records = {number: record for of_rank in from_all_ranks(held) for number, record in of_rank.items()}
    return [records[number] for number in range(len(infos))]


def within_budgets(
    samples: Mapping[int, Sample], infos: Sequence[SampleInfo], scorer: Scorer
) -> dict[int, list[float | None]]:
    """Success term of each sample, for the completion cut at every budget; None without a score.

    Args:
        samples: Samples that this rank holds, by number.
        infos: What is known of all samples, by number.
        scorer: The budgets, and the reward.
    """
    longer = [(n, b) for n, sample in samples.items() for b in scorer.budgets if len(sample.token_ids) > b]
    parts = [_cut(samples[number], budget, scorer.decode) for number, budget in longer]
    scores = dict(zip(longer, scorer.score(parts) if parts else (), strict=True))
    return {
        number: [scores.get((number, b), infos[number].score).terms.get(scorer.success) for b in scorer.budgets]
        for number in samples
    }


def _cut(sample: Sample, tokens: int, decode: Callable[[Sequence[int]], str]) -> Sample:
    """The sample as the length limit would have cut it, without its stop token."""
    kept = sample.token_ids[:tokens]
    return replace(
        sample,
        token_ids=kept,
        logprobs=sample.logprobs[:tokens],
        finish_reason="length",
        text=decode(kept),
        experts=None,
    )
