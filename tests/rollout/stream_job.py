"""One of the ranks whose stream makes groups with an embedded engine; prints {check: what went wrong}.

Usage: stream_job.py FOLDER OVERRIDE...
"""

from __future__ import annotations

import json
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import engine_contract_job  # prepares the platform
import pytest
import torch.distributed as dist
from composed import composed
from engine_contract import LONG, Bench, refused, sampling

from grpo_mega.config.schema import RewardConfig, RewardTerm
from grpo_mega.observe.samples import sample_record
from grpo_mega.observe.timer import PhaseTimer
from grpo_mega.platform.stop import Interrupted
from grpo_mega.reward.compose import Reward, build_reward
from grpo_mega.rollout.contract import EngineRestarted
from grpo_mega.rollout.stream import Stream, generate
from grpo_mega.stages.rollouts import DirectAccess, Rollouts
from grpo_mega.stages.step import StepOptions
from grpo_mega.types import Group, Prompt, Rollout, Sample, SampleInfo, Score

HOW = sampling(max_new_tokens=LONG, stop_ids=(2, 3, 4, 5, 6))
REWARD = build_reward(
    RewardConfig(
        terms=[RewardTerm("drawn", function="rollout_rewards:drawn"), RewardTerm("format", 0.5)], success="drawn"
    )
)
EXPECTED: dict[tuple[str, ...], list[tuple[Sample, Score]]] = {}


@dataclass
class Scorer:
    """Scores samples on the rank that holds them.

    Attributes:
        scored: (prompt id, index) of what this rank has scored, as often as it has.
        at_work: Whether samples were under way, for each call.
        sizes: How many samples all ranks together had in each call.
    """

    bench: Bench
    reward: Reward = REWARD
    scored: Counter[tuple[str, int]] = field(default_factory=Counter)
    at_work: list[bool] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        self.at_work.append(self.bench.engine.busy)
        self.sizes.append(sum(everyones(len(samples))))
        self.scored.update((s.prompt.id, s.index) for s in samples)
        return self.reward.score(samples)

    def check_each_was_scored_once(self, prompts: Sequence[Prompt]) -> None:
        """By all ranks together."""
        assert sum(everyones(self.scored), Counter()) == Counter((p.id, index) for p in prompts for index in range(3))


def everyones(mine):
    """What every rank has, by rank."""
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered


Scored = tuple[Sample, Score]


def whole(rollout: Rollout) -> list[Scored]:
    """All samples of a rollout with their scores, once it is seen that each is held by the one rank that all name."""
    gathered = everyones(rollout)
    assert all(theirs.groups == rollout.groups for theirs in gathered)
    infos = [*rollout.infos]
    held = {number: (rank, s) for rank, theirs in enumerate(gathered) for number, s in theirs.samples.items()}
    assert sum(len(theirs.samples) for theirs in gathered) == len(held)
    assert sorted(held) == [*range(len(infos))]
    prompts = [group.prompt for group in rollout.groups for _ in group.infos]
    for number, info in enumerate(infos):
        holder, s = held[number]
        assert (s.prompt, s.index) == (prompts[number], number % 3)
        assert info == SampleInfo(len(s.token_ids), s.finish_reason, s.segments, info.score, holder, s.repeated(8))
    return [(held[number][1], info.score) for number, info in enumerate(infos)]


def many(bench: Bench) -> list[Prompt]:
    """Prompts for several waves on each rank."""
    return [replace(p, id=f"{p.id}-{i}") for i in range(4) for p in bench.prompts]


def expected(bench: Bench, prompts: Sequence[Prompt]) -> list[Scored]:
    """First generated, then scored: one thing after the other, in the order of the prompts; once for many checks."""
    names = tuple(prompt.id for prompt in prompts)
    if names not in EXPECTED:
        samples = generate(bench.engine, prompts, 3, HOW, bench.version)
        EXPECTED[names] = [*zip(samples, REWARD.score(samples), strict=True)]
    return EXPECTED[names]


def alike(outcome: list[Scored], others: list[Scored]) -> bool:
    """Whether they are equal but for the rounding of log-probs, which depends on what else was in a wave."""
    for (sample, score), (twin, due) in zip(outcome, others, strict=True):
        if replace(sample, logprobs=array("f")) != replace(twin, logprobs=array("f")) or score != due:
            return False
        if [*sample.logprobs] != pytest.approx([*twin.logprobs], abs=1e-5):
            return False
    return True


def empty(bench: Bench) -> None:
    """Nothing is under way any more."""
    if bench.engine.busy:
        with suppress(Interrupted):
            bench.engine.poll(interrupted=True)


def stream_of(bench: Bench, score, prompts: Sequence[Prompt], at_least: int = 1) -> Stream:
    """A stream with these prompts."""
    stream = Stream(bench.engine, score, 3, at_least)
    stream.add(prompts)
    return stream


def all_of(stream: Stream, bench: Bench, **more) -> Rollout:
    """All groups of a stream, once it has generated them."""
    stream.advance(HOW, bench.version, **more)
    return stream.take()


def check_groups_are_those_of_one_thing_after_the_other(bench: Bench) -> None:
    """In every bit and in order, though they finish in another one and are scored while others are generated."""
    score, prompts = Scorer(bench), many(bench)
    stream = stream_of(bench, score, prompts)
    rollout = all_of(stream, bench)
    assert whole(rollout) == expected(bench, prompts)
    assert [group.prompt for group in rollout.groups] == prompts
    assert not stream.unfinished
    assert not stream.complete
    assert score.at_work[0]
    assert len(score.at_work) > 2
    score.check_each_was_scored_once(prompts)


def check_slices_make_the_same_samples(bench: Bench) -> None:
    """Token for token, whatever the slices; prompts that come in between are no other, nor those that are taken out."""
    prompts, draw = many(bench), HOW.draw
    for size in (1, 7, LONG):
        score, taken, number = Scorer(bench), [], 0
        stream = Stream(bench.engine, score, 3)
        stream.add(prompts[:-4], draw)
        while stream.unfinished or number < 2:
            number += 1
            if number == 2:
                stream.add(prompts[-4:], draw)
            # The noise is that of the draw with which a prompt was added.
            stream.advance(replace(HOW, draw=draw + number), bench.version, size)
            if number % 3 == 0:
                taken.append(stream.take(stream.ready("finished")))
        taken.append(stream.take())
        pairs = {(s.prompt.id, s.index): (s, scored) for rollout in taken for s, scored in whole(rollout)}
        outcome = [pairs[prompt.id, index] for prompt in prompts for index in range(3)]
        assert len(outcome) == sum(len(rollout.groups) for rollout in taken) * 3
        assert alike(outcome, expected(bench, prompts)), size
        score.check_each_was_scored_once(prompts)


def check_prompts_that_are_asked_for_follow_the_others(bench: Bench) -> None:
    """Every group is shown once, when it is complete, to all ranks in one order; some ask for one more prompt."""
    score, prompts = Scorer(bench), many(bench)
    first, later = prompts[:-6], iter(prompts[-6:])
    asking = [*first[::4], prompts[-6]]
    shown: list[str] = []

    def refill(groups: Sequence[Group]) -> list[Prompt]:
        shown.extend(group.prompt.id for group in groups)
        return [next(later) for group in groups if group.prompt in asking]

    rollout = all_of(stream_of(bench, score, first), bench, refill=refill)
    drawn = [group.prompt for group in rollout.groups]
    assert drawn == prompts[: len(first) + len(asking)]
    assert sorted(shown) == sorted(prompt.id for prompt in drawn)
    assert all(theirs == shown for theirs in everyones(shown))
    assert alike(whole(rollout), expected(bench, drawn))
    score.check_each_was_scored_once(drawn)


def check_ranks_share_the_samples(bench: Bench) -> None:
    """None that has a part in generating them holds all, or none."""
    held = everyones(len(all_of(stream_of(bench, Scorer(bench), many(bench)), bench).samples))
    assert max(held) - min(held) <= dist.get_world_size()


def check_equal_prompts_have_samples_of_their_own(bench: Bench) -> None:
    """Ranks that finish the same sample of two of them at once agree on which of the two each holds."""
    prompts = [prompt for prompt in bench.prompts for _ in range(3)]  # one after the other goes to another replica
    assert alike(whole(all_of(stream_of(bench, Scorer(bench), prompts), bench)), expected(bench, prompts))


def at_poll(number: int, then: Callable[[], bool]) -> Callable[[], bool]:
    """What a stream asks before every poll: False until that one, then what `then` says."""
    polls = count(1)
    return lambda: next(polls) >= number and then()


def check_samples_are_scored_so_many_at_a_time_and_the_last_ones_anyway(bench: Bench) -> None:
    """In between, in one go at the end, and with what is left after an interruption."""
    prompts, size = many(bench), 3 * len(many(bench))
    last = dist.get_rank() == dist.get_world_size() - 1
    for at_least in (7, size, size + 1):
        score = Scorer(bench)
        stream = stream_of(bench, score, prompts, at_least)
        with pytest.raises(Interrupted):
            all_of(stream, bench, interrupted=at_poll(2, lambda: last))
        assert alike(whole(all_of(stream, bench)), expected(bench, prompts))
        assert all(size >= at_least for size in score.sizes[:-1])
        assert len(score.sizes) > 1 if at_least == 7 else len(score.sizes) == 1
        score.check_each_was_scored_once(prompts)


def check_an_interrupted_stream_goes_on(bench: Bench) -> None:
    """The last rank alone is interrupted, when some samples are scored; nothing is lost or scored twice."""
    score, prompts = Scorer(bench), many(bench)
    stream = stream_of(bench, score, prompts)
    last = dist.get_rank() == dist.get_world_size() - 1
    with pytest.raises(Interrupted):
        all_of(stream, bench, interrupted=lambda: last and len(score.at_work) > 0)
    assert stream.unfinished
    assert score.at_work
    assert not bench.engine.busy
    assert alike(whole(all_of(stream, bench)), expected(bench, prompts))
    score.check_each_was_scored_once(prompts)


def unscored_at_the_second_poll(bench: Bench, score: Scorer, end: Callable[[], bool]) -> tuple[Stream, list[int]]:
    """A stream that scores only when nothing is under way, and what its second poll asks; how many were finished."""
    finished: list[int] = []

    def ask() -> bool:
        finished.append(3 * len(many(bench)) - bench.engine._contract.under_way)
        return end()

    stream = stream_of(bench, score, many(bench), at_least=10**6)
    with pytest.raises((Interrupted, EngineRestarted)):
        all_of(stream, bench, interrupted=at_poll(2, ask))
    assert finished[0]
    return stream, finished


def check_what_was_not_announced_is_forgotten_by_an_interruption(bench: Bench) -> None:
    """On all ranks alike: all of it is generated again, and scored once."""
    score, prompts = Scorer(bench), many(bench)
    stream, _ = unscored_at_the_second_poll(bench, score, lambda: True)
    assert not score.sizes
    assert alike(whole(all_of(stream, bench)), expected(bench, prompts))
    assert score.sizes == [3 * len(prompts)]


def check_what_was_handed_out_outlives_a_lost_engine(bench: Bench) -> None:
    """It is scored and announced before the loss is raised, and not generated again."""
    score, prompts = Scorer(bench), many(bench)

    def lost() -> bool:
        with suppress(Interrupted):
            bench.engine.poll(interrupted=True)
        raise EngineRestarted("an engine was lost")

    stream, (finished,) = unscored_at_the_second_poll(bench, score, lost)
    assert score.sizes == [finished]
    assert stream.in_slice
    assert alike(whole(all_of(stream, bench)), expected(bench, prompts))
    assert score.sizes == [finished, 3 * len(prompts) - finished]
    score.check_each_was_scored_once(prompts)


def check_a_reward_that_fails_names_rank_term_prompt_and_sample(bench: Bench) -> None:
    """On every rank; when it has come to its senses, nothing is missing."""
    terms = [RewardTerm("mine", function="rollout_rewards:fails")]
    reward = build_reward(RewardConfig(terms=terms, success="mine"))
    score, prompts = Scorer(bench, reward), many(bench)
    stream = stream_of(bench, score, prompts)
    with pytest.raises(RuntimeError, match=r"rank \d: reward term 'mine', prompt '[^']*-3', sample 1.*such answer"):
        all_of(stream, bench)
    empty(bench)
    score.reward = REWARD
    unscored = Score(0.0, {})
    both = whole(all_of(stream, bench)), expected(bench, prompts)
    assert alike(*([(s, unscored) for s, _ in scored] for scored in both))


def check_a_reward_that_fails_on_one_rank_is_an_error_of_all(bench: Bench) -> None:
    last = dist.get_world_size() - 1

    def fails(samples: Sequence[Sample]) -> list[Score]:
        if dist.get_rank() == last:
            raise ArithmeticError("not today")
        return REWARD.score(samples)

    with pytest.raises(RuntimeError, match=rf"rank {last}: ArithmeticError: not today$"):
        all_of(stream_of(bench, fails, bench.prompts), bench)
    empty(bench)


def check_a_scorer_that_leaves_samples_out_is_noticed(bench: Bench) -> None:
    with pytest.raises(ValueError, match=r"ValueError: the reward returned \d+ scores for \d+ samples"):
        all_of(stream_of(bench, lambda samples: REWARD.score(samples)[1:], bench.prompts), bench)
    empty(bench)


def check_a_second_stream_is_refused_while_the_first_is_at_work(bench: Bench) -> None:
    prompts = many(bench)
    first, second = (stream_of(bench, Scorer(bench), prompts) for _ in range(2))

    def ask() -> bool:
        refused(lambda: all_of(second, bench), "another caller")
        return False

    assert [group.prompt for group in all_of(first, bench, interrupted=at_poll(2, ask)).groups] == prompts
    assert [group.prompt for group in all_of(second, bench).groups] == prompts


def spelled(ids: Sequence[int]) -> str:
    return "".join(f"{token};" for token in ids)


def check_what_is_shown_is_whole_groups(bench: Bench) -> None:
    """In their order on the main rank, whoever holds them, and nowhere else."""
    config, topology = composed("experiment=tiny"), bench.policy.topology
    bench.policy.updates = bench.version
    rollout = all_of(stream_of(bench, Scorer(bench), many(bench)), bench)
    scored, access = whole(rollout), DirectAccess(PhaseTimer())
    signal = [number % 3 > 0 for number in range(len(many(bench)))]
    assert len(scored) == 3 * len(many(bench))
    for most in (0, 5, len(many(bench)), 10**6):
        config.run.sample_groups_per_step = most
        sections = (StepOptions.of(config), config.run, config.eval, config.reward)
        made = {"engine": bench.engine, "access": access, "score": REWARD.score, "policy": bench.policy}
        rollouts = Rollouts(*sections, **made, stop_ids=(2,), decode=spelled)
        chosen, records = rollouts.shown(rollout, signal, 7)
        assert chosen == sorted({*chosen})
        assert len(chosen) == min(most, len(many(bench)))
        numbers = [(at, 3 * group + index) for at, group in enumerate(chosen) for index in range(3)]
        expected = [sample_record(*scored[number], at, spelled) for at, number in numbers]
        assert records == (expected if topology.rank == 0 else [])


CHECKS = {name.removeprefix("check_"): check for name, check in globals().items() if name.startswith("check_")}

if __name__ == "__main__":
    bench = engine_contract_job.made(Path(sys.argv[1]), "embedded", *sys.argv[2:])
    bench.engine.concurrent_sequences = 12
    bench.push_all()
    outcome = {name: engine_contract_job.problem(bench, check) for name, check in CHECKS.items()}
    engine_contract_job.leave_layout()
    print(json.dumps(outcome))
