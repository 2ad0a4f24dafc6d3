"""One of the ranks whose producer makes groups with an embedded engine; prints {check: what went wrong}.

Usage: producer_job.py FOLDER OVERRIDE...
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import engine_contract_job  # prepares the platform
import pytest
import torch.distributed as dist
from engine_contract import LONG, Bench, refused, sampling

from grpo_mega.config.schema import RewardConfig, RewardTerm
from grpo_mega.platform.stop import Interrupted
from grpo_mega.reward.compose import Reward, build_reward
from grpo_mega.rollout.producer import Producer
from grpo_mega.types import Group, Prompt, Sample, Score

HOW = sampling(max_new_tokens=LONG, stop_ids=(2, 3, 4, 5, 6))
REWARD = build_reward(
    RewardConfig(
        terms=[RewardTerm("drawn", function="rollout_rewards:drawn"), RewardTerm("format", 0.5)], success="drawn"
    )
)


@dataclass
class Scorer:
    """Scores each sample on one rank alone, for all.

    Attributes:
        scored: (prompt id, index) of what this rank has scored itself, as often as it has.
        at_work: Whether samples were under way, for each call.
    """

    bench: Bench
    reward: Reward = REWARD
    scored: Counter[tuple[str, int]] = field(default_factory=Counter)
    at_work: list[bool] = field(default_factory=list)

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        self.at_work.append(self.bench.engine.busy)
        return self.bench.policy.topology.spread_over_ranks(samples, self._mine)

    def _mine(self, samples: Sequence[Sample]) -> list[Score]:
        self.scored.update((s.prompt.id, s.index) for s in samples)
        return self.reward.score(list(samples))

    def check_each_was_scored_once(self, prompts: Sequence[Prompt]) -> None:
        """By all ranks together."""
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.scored)
        assert sum(everyone, Counter()) == Counter((p.id, index) for p in prompts for index in range(3))


def many(bench: Bench) -> list[Prompt]:
    """Prompts for several waves on each rank."""
    return [replace(p, id=f"{p.id}-{i}") for i in range(6) for p in bench.prompts]


def expected(bench: Bench, prompts: Sequence[Prompt]) -> list[Group]:
    """First generated, then scored: one thing after the other, in the order of the prompts."""
    samples = bench.engine.generate(list(prompts), 3, HOW, bench.version)
    scores = REWARD.score(samples)
    groups = []
    for first in range(0, len(samples), 3):
        groups.append(Group(tuple(samples[first : first + 3]), tuple(scores[first : first + 3])))
    return groups


def alike(groups: list[Group], others: list[Group]) -> bool:
    """Whether they are equal but for the rounding of log-probs, which depends on what else was in a wave."""
    for group, other in zip(groups, others, strict=True):
        for sample, twin in zip(group.samples, other.samples, strict=True):
            if replace(sample, logprobs=()) != replace(twin, logprobs=()):
                return False
            if sample.logprobs != pytest.approx(twin.logprobs, abs=1e-5):
                return False
    return [g.scores for g in groups] == [g.scores for g in others]


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
    assert producer.run() == expected(bench, prompts)
    assert not producer.busy
    assert score.at_work[0]
    assert len(score.at_work) > 2
    score.check_each_was_scored_once(prompts)


def check_groups_come_in_turn_while_others_are_generated(bench: Bench) -> None:
    """The order in which they finish is another one; prompts that are added on the way come last."""
    score, prompts = Scorer(bench), many(bench)
    producer = Producer(bench.engine, score, 3, HOW, bench.version)
    producer.add(prompts[:-4])
    groups: list[Group] = []
    early = 0
    while producer.busy:
        groups += producer.poll()
        early += producer.busy and bool(groups)
        if early == 1:
            producer.add(prompts[-4:])
            early += 1
    assert early, "all groups came at once"
    assert [group.prompt for group in groups] == prompts
    assert alike(groups, expected(bench, prompts))
    score.check_each_was_scored_once(prompts)
    refused(producer.poll, "no sample is under way")


def check_samples_are_scored_so_many_at_a_time_and_the_last_ones_anyway(bench: Bench) -> None:
    """In between, in one go at the end, and with what is left after an interruption."""
    prompts, size = many(bench), 3 * len(many(bench))
    last = dist.get_rank() == dist.get_world_size() - 1
    for at_least in (7, size, size + 1):
        sizes: list[int] = []
        score = Scorer(bench)

        def counted(samples: Sequence[Sample], score: Scorer = score, sizes: list[int] = sizes) -> list[Score]:
            sizes.append(len(samples))
            return score(samples)

        producer = Producer(bench.engine, counted, 3, HOW, bench.version, at_least)
        producer.add(prompts)
        groups = producer.poll()
        with pytest.raises(Interrupted):
            producer.run(lambda: last)
        groups += producer.run()
        assert alike(groups, expected(bench, prompts))
        assert all(size >= at_least for size in sizes[:-1])
        assert len(sizes) > 1 if at_least == 7 else len(sizes) == 1
        score.check_each_was_scored_once(prompts)


def check_an_interrupted_producer_goes_on(bench: Bench) -> None:
    """The last rank alone is interrupted, when some groups are scored; nothing is lost or scored twice."""
    score, prompts = Scorer(bench), many(bench)
    producer = Producer(bench.engine, score, 3, HOW, bench.version)
    producer.add(prompts)
    last = dist.get_rank() == dist.get_world_size() - 1
    with pytest.raises(Interrupted):
        producer.run(lambda: last and len(score.at_work) > 0)
    assert producer.busy
    assert score.at_work
    assert not bench.engine.busy
    assert alike(producer.run(), expected(bench, prompts))
    score.check_each_was_scored_once(prompts)


def check_a_reward_that_fails_names_term_prompt_and_sample(bench: Bench) -> None:
    """On every rank, as each scores all."""
    terms = [RewardTerm("mine", function="rollout_rewards:fails")]
    reward = build_reward(RewardConfig(terms=terms, success="mine"))
    producer = Producer(bench.engine, lambda samples: reward.score(list(samples)), 3, HOW, bench.version)
    prompts = many(bench)
    producer.add(prompts)
    with pytest.raises(RuntimeError, match=r"'mine', prompt '[^']*-3', sample 1.*no such answer"):
        producer.run()
    empty(bench)


def check_a_scorer_that_leaves_samples_out_is_noticed(bench: Bench) -> None:
    producer = Producer(bench.engine, lambda samples: REWARD.score(list(samples))[1:], 3, HOW, bench.version)
    producer.add(bench.prompts)
    with pytest.raises(ValueError, match=r"samples were to be scored, and there are \d+ scores"):
        producer.run()
    empty(bench)


def check_a_second_producer_is_refused_while_the_first_is_at_work(bench: Bench) -> None:
    first, second = (Producer(bench.engine, Scorer(bench), 3, HOW, bench.version) for _ in range(2))
    prompts = many(bench)
    first.add(prompts)
    second.add(prompts)
    groups = first.poll()
    refused(second.poll, "somebody else")
    assert [group.prompt for group in groups + first.run()] == prompts
    assert [group.prompt for group in second.run()] == prompts


CHECKS = {name.removeprefix("check_"): check for name, check in globals().items() if name.startswith("check_")}

if __name__ == "__main__":
    bench = engine_contract_job.made(Path(sys.argv[1]), "embedded", *sys.argv[2:])
    bench.engine.concurrent_sequences = 12
    bench.push_all()
    found = {name: engine_contract_job.problem(bench, check) for name, check in CHECKS.items()}
    engine_contract_job.leave_layout()
    print(json.dumps(found))
