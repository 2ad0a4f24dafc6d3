"""One of the ranks whose producer makes groups with an embedded engine; prints {check: what went wrong}.

Usage: producer_job.py FOLDER OVERRIDE...
"""

from __future__ import annotations

import json
import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
from grpo_mega.rollout.producer import Producer, generate
from grpo_mega.stages.rollouts import Rollouts, WithoutTurns
from grpo_mega.types import Answer, Group, Prompt, Rollout, Sample, Score

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
    answers = [*rollout.answers]
    held = {number: (rank, s) for rank, theirs in enumerate(gathered) for number, s in theirs.samples.items()}
    assert sum(len(theirs.samples) for theirs in gathered) == len(held)
    assert sorted(held) == [*range(len(answers))]
    prompts = [group.prompt for group in rollout.groups for _ in group.answers]
    for number, answer in enumerate(answers):
        holder, s = held[number]
        assert (s.prompt, s.index) == (prompts[number], number % 3)
        assert answer == Answer(len(s.token_ids), s.finish_reason, s.segments, answer.score, holder, s.repeated(8))
    return [(held[number][1], answer.score) for number, answer in enumerate(answers)]


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
    bench.engine.abort()
    while bench.engine.busy:
        bench.engine.poll()


def check_groups_are_those_of_one_thing_after_the_other(bench: Bench) -> None:
    """In every bit and in order, though they finish in another one and are scored while others are generated."""
    score, prompts = Scorer(bench), many(bench)
    producer = Producer(bench.engine, score, 3, HOW, bench.version)
    producer.add(prompts)
    rollout = producer.run()
    assert whole(rollout) == expected(bench, prompts)
    assert [group.prompt for group in rollout.groups] == prompts
    assert not producer.busy
    assert score.at_work[0]
    assert len(score.at_work) > 2
    score.check_each_was_scored_once(prompts)


def check_groups_come_in_turn_while_others_are_generated(bench: Bench) -> None:
    """The order in which they finish is another one; prompts that are added on the way come last."""
    score, prompts = Scorer(bench), many(bench)
    producer = Producer(bench.engine, score, 3, HOW, bench.version)
    producer.add(prompts[:-4])
    outcome: list[Scored] = []
    early = 0
    while producer.busy:
        outcome += whole(producer.poll())
        early += producer.busy and bool(outcome)
        if early == 1:
            producer.add(prompts[-4:])
            early += 1
    assert early, "all groups came at once"
    assert alike(outcome, expected(bench, prompts))
    score.check_each_was_scored_once(prompts)
    refused(producer.poll, "no sample is under way")


def check_prompts_that_are_asked_for_follow_the_others(bench: Bench) -> None:
    """Every group is shown once, when it is complete, to all ranks in one order; some ask for one more prompt."""
    score, prompts = Scorer(bench), many(bench)
    first, later = prompts[:-6], iter(prompts[-6:])
    asking = [*first[::4], prompts[-6]]
    shown: list[str] = []

    def refill(groups: Sequence[Group]) -> list[Prompt]:
        shown.extend(group.prompt.id for group in groups)
        return [next(later) for group in groups if group.prompt in asking]

    producer = Producer(bench.engine, score, 3, HOW, bench.version, refill=refill)
    producer.add(first)
    rollout = producer.run()
    drawn = [group.prompt for group in rollout.groups]
    assert drawn == prompts[: len(first) + len(asking)]
    assert sorted(shown) == sorted(prompt.id for prompt in drawn)
    assert all(theirs == shown for theirs in everyones(shown))
    assert alike(whole(rollout), expected(bench, drawn))
    score.check_each_was_scored_once(drawn)


def check_ranks_share_the_samples(bench: Bench) -> None:
    """None that has a part in generating them holds all, or none."""
    producer = Producer(bench.engine, Scorer(bench), 3, HOW, bench.version)
    producer.add(many(bench))
    held = everyones(len(producer.run().samples))
    assert max(held) - min(held) <= dist.get_world_size()


def check_equal_prompts_have_samples_of_their_own(bench: Bench) -> None:
    """Ranks that finish the same sample of two of them at once agree on which of the two each holds."""
    prompts = [prompt for prompt in bench.prompts for _ in range(3)]  # one after the other goes to another replica
    producer = Producer(bench.engine, Scorer(bench), 3, HOW, bench.version)
    producer.add(prompts)
    assert alike(whole(producer.run()), expected(bench, prompts))


def check_samples_are_scored_so_many_at_a_time_and_the_last_ones_anyway(bench: Bench) -> None:
    """In between, in one go at the end, and with what is left after an interruption."""
    prompts, size = many(bench), 3 * len(many(bench))
    last = dist.get_rank() == dist.get_world_size() - 1
    for at_least in (7, size, size + 1):
        score = Scorer(bench)
        producer = Producer(bench.engine, score, 3, HOW, bench.version, at_least)
        producer.add(prompts)
        outcome = whole(producer.poll())
        with pytest.raises(Interrupted):
            producer.run(lambda: last)
        outcome += whole(producer.run())
        assert alike(outcome, expected(bench, prompts))
        assert all(size >= at_least for size in score.sizes[:-1])
        assert len(score.sizes) > 1 if at_least == 7 else len(score.sizes) == 1
        score.check_each_was_scored_once(prompts)


def check_an_interrupted_producer_goes_on(bench: Bench) -> None:
    """The last rank alone is interrupted, when some samples are scored; nothing is lost or scored twice."""
    score, prompts = Scorer(bench), many(bench)
    producer = Producer(bench.engine, score, 3, HOW, bench.version)
    producer.add(prompts)
    last = dist.get_rank() == dist.get_world_size() - 1
    with pytest.raises(Interrupted):
        producer.run(lambda: last and len(score.at_work) > 0)
    assert producer.busy
    assert score.at_work
    assert not bench.engine.busy
    assert alike(whole(producer.run()), expected(bench, prompts))
    score.check_each_was_scored_once(prompts)


def finished_and_unscored(bench: Bench, score: Scorer, prompts: Sequence[Prompt]) -> tuple[Producer, int]:
    """A producer that scores only when nothing is under way, at a moment when some samples are finished; how many."""
    producer = Producer(bench.engine, score, 3, HOW, bench.version, at_least=10**6)
    producer.add(prompts)
    producer.poll()
    finished = 3 * len(prompts) - bench.engine._contract.under_way
    assert finished
    assert not score.sizes
    return producer, finished


def check_what_was_not_announced_is_forgotten_by_an_interruption(bench: Bench) -> None:
    """On all ranks alike: all of it is generated again, and scored once."""
    score, prompts = Scorer(bench), many(bench)
    producer, _ = finished_and_unscored(bench, score, prompts)
    with pytest.raises(Interrupted):
        producer.poll(lambda: True)
    assert not score.sizes
    assert alike(whole(producer.run()), expected(bench, prompts))
    assert score.sizes == [3 * len(prompts)]


def check_what_was_handed_out_outlives_a_lost_engine(bench: Bench) -> None:
    """It is scored and announced before the loss is raised, and not generated again."""
    score, prompts = Scorer(bench), many(bench)
    producer, finished = finished_and_unscored(bench, score, prompts)

    def lost() -> bool:
        bench.engine._drop()
        raise EngineRestarted("an engine was lost")

    with pytest.raises(EngineRestarted):
        producer.poll(lost)
    assert score.sizes == [finished]
    assert alike(whole(producer.run()), expected(bench, prompts))
    assert score.sizes == [finished, 3 * len(prompts) - finished]
    score.check_each_was_scored_once(prompts)


def check_a_reward_that_fails_names_rank_term_prompt_and_sample(bench: Bench) -> None:
    """On every rank; when it has come to its senses, nothing is missing."""
    terms = [RewardTerm("mine", function="rollout_rewards:fails")]
    reward = build_reward(RewardConfig(terms=terms, success="mine"))
    score = Scorer(bench, reward)
    producer = Producer(bench.engine, score, 3, HOW, bench.version)
    prompts = many(bench)
    producer.add(prompts)
    with pytest.raises(RuntimeError, match=r"rank \d: reward term 'mine', prompt '[^']*-3', sample 1.*such answer"):
        producer.run()
    empty(bench)
    score.reward = REWARD
    unscored = Score(0.0, {})
    assert alike(*([(s, unscored) for s, _ in scored] for scored in (whole(producer.run()), expected(bench, prompts))))


def check_a_reward_that_fails_on_one_rank_is_an_error_of_all(bench: Bench) -> None:
    last = dist.get_world_size() - 1

    def fails(samples: Sequence[Sample]) -> list[Score]:
        if dist.get_rank() == last:
            raise ArithmeticError("not today")
        return REWARD.score(samples)

    producer = Producer(bench.engine, fails, 3, HOW, bench.version)
    producer.add(bench.prompts)
    with pytest.raises(RuntimeError, match=rf"rank {last}: ArithmeticError: not today$"):
        producer.run()
    empty(bench)


def check_a_scorer_that_leaves_samples_out_is_noticed(bench: Bench) -> None:
    producer = Producer(bench.engine, lambda samples: REWARD.score(samples)[1:], 3, HOW, bench.version)
    producer.add(bench.prompts)
    with pytest.raises(ValueError, match=r"ValueError: the reward returned \d+ scores for \d+ samples"):
        producer.run()
    empty(bench)


def check_a_second_producer_is_refused_while_the_first_is_at_work(bench: Bench) -> None:
    first, second = (Producer(bench.engine, Scorer(bench), 3, HOW, bench.version) for _ in range(2))
    prompts = many(bench)
    first.add(prompts)
    second.add(prompts)
    groups = first.poll().groups
    refused(second.poll, "another caller")
    assert [group.prompt for group in groups + first.run().groups] == prompts
    assert [group.prompt for group in second.run().groups] == prompts


def spelled(ids: Sequence[int]) -> str:
    return "".join(f"{token};" for token in ids)


def check_what_is_shown_is_whole_groups(bench: Bench) -> None:
    """In their order on the main rank, whoever holds them, and nowhere else."""
    config, topology = composed("experiment=tiny"), bench.policy.topology
    producer = Producer(bench.engine, Scorer(bench), 3, HOW, bench.version)
    producer.add(many(bench))
    rollout = producer.run()
    scored, turns = whole(rollout), WithoutTurns(PhaseTimer())
    signal = [number % 3 > 0 for number in range(len(many(bench)))]
    assert len(scored) == 3 * len(many(bench))
    for count in (0, 5, len(many(bench)), 10**6):
        config.run.sample_groups_per_step = count
        rollouts = Rollouts(config, bench.engine, turns, REWARD.score, topology, (2,), spelled)
        chosen, records = rollouts.shown(rollout, signal, 7)
        assert chosen == sorted({*chosen})
        assert len(chosen) == min(count, len(many(bench)))
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
