"""What completions are worth when they are cut after so many tokens."""

from __future__ import annotations

from array import array

from grpo_mega.config.schema import RewardConfig, RewardTerm
from grpo_mega.evaluate.generate import Scorer, within_budgets
from grpo_mega.reward.compose import build_reward
from grpo_mega.types import Prompt, Sample, SampleInfo, Score

EOS = 0
COMPLETIONS = [
    (r"so \boxed{8}", True),
    (r"\boxed{8} is it", True),
    (r"\boxed{9} or \boxed{8}", True),
    (r"and \boxed{8}", False),  # the length limit has cut it
]


def decode(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def sample(text: str, stopped: bool) -> Sample:
    """One token a character, and the one that ends it."""
    ids = array("i", [*map(ord, text), *([EOS] if stopped else [])])
    reason = "stop" if stopped else "length"
    prompt = Prompt("p", (1,), "3+5?", "8", "sums")
    return Sample(prompt, 0, ids, array("f", [0.0] * len(ids)), reason, ((0, 0),), text)


def within(term: RewardTerm, *budgets: int) -> list[list[float | None]]:
    reward = build_reward(RewardConfig([term], term.name))
    samples = {number: sample(*one) for number, one in enumerate(COMPLETIONS)}
    scores = reward.score([*samples.values()])
    infos = [
        SampleInfo(len(s.token_ids), s.finish_reason, s.segments, score)
        for s, score in zip(samples.values(), scores, strict=True)
    ]
    found = within_budgets(samples, infos, Scorer(reward.score, term.name, None, budgets, decode))
    return [found[number] for number in range(len(COMPLETIONS))]


def test_an_answer_counts_from_the_budget_on_that_it_came_within() -> None:
    first, second, several, cut = within(RewardTerm(name="boxed"), 1, 9, 11, 12, 13, 20, 21)
    assert first == [0, 0, 0, 1, 1, 1, 1]
    assert second == [0, 1, 1, 1, 1, 1, 1]
    assert several == [0, 0, 0, 0, 0, 0, 0]
    assert cut == [0, 0, 0, 0, 1, 1, 1]


def test_one_that_ends_just_within_its_budget_has_stopped_by_itself() -> None:
    ends = len(COMPLETIONS[0][0]) + 1
    first, *_ = within(RewardTerm(name="exact", kind="regex", options={"pattern": "8"}), ends - 1, ends)
    assert first == [0, 1]


def test_without_a_score_nothing_counts() -> None:
    infos = [SampleInfo(3, "stop", ((0, 0),), Score(0.0, {}, unscorable="the judge is away"))]
    away = Scorer(lambda cut: [Score(0.0, {}, unscorable="away")] * len(cut), "accuracy", None, (2, 3), decode)
    assert within_budgets({0: sample("ab", True)}, infos, away) == {0: [None, None]}
