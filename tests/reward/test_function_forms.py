"""What a user's function may be and return: reasons, samples without a score, many at once; and what failures leave."""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mega.config.schema import RewardConfig, RewardModelConfig, RewardTerm
from grpo_mega.reward.compose import Reward, build_reward
from grpo_mega.types import Prompt, Sample, Score


def sample(text: str = "abc", index: int = 0, task: str = "sums") -> Sample:
    prompt = Prompt(id="p/1", token_ids=(1,), text="3+5=?", answer="8", task=task)
    return Sample(prompt, index, array("i", [2]), array("f", [0.0]), "stop", ((0, 0),), text)


def reward(name: str, on_error: str = "stop", seconds: float = 600, **options: object) -> Reward:
    term = RewardTerm(function=f"answering_functions:{name}", options=options)
    return build_reward(RewardConfig([term], name, seconds, on_error))


def test_a_reason_goes_into_the_score():
    assert reward("pair").score([sample()]) == [Score(3.0, {"pair": 3.0}, "pair: abc is short")]


@pytest.mark.parametrize(
    ("name", "gets"), [("of_columns", "one argument, the sample"), ("of_lists", "a list of samples")]
)
def test_a_function_that_cannot_be_called_with_samples_is_told_what_it_gets(name: str, gets: str):
    words = f"TypeError: missing a required argument: 'answer'; it is called with {gets}, and with its options by name"
    with pytest.raises(Exception, match=words):
        reward(name).score([sample()])


def test_a_decorator_may_take_other_arguments_than_its_function():
    assert reward("decorated").score([sample()]) == [Score(4.0, {"decorated": 4.0})]


def test_reasons_of_several_terms_are_joined():
    terms = [RewardTerm(function=f"answering_functions:{name}") for name in ("pair", "grade")] + [RewardTerm("format")]
    (score,) = build_reward(RewardConfig(terms, "pair")).score([sample("a")])
    assert score == Score(1.5, {"pair": 1.0, "grade": 0.5, "format": 0.0}, "pair: a is short; grade: a")


def test_an_object_with_the_fields_of_a_verdict_is_one():
    assert reward("grade").score([sample("")]) == [Score(0.5, {"grade": 0.5})]


def test_a_sample_that_could_not_be_scored_has_no_terms_and_is_logged(caplog: pytest.LogCaptureFixture):
    terms = [RewardTerm("first", 1.0, "answering_functions:away"), RewardTerm("format")]
    built = build_reward(RewardConfig(terms, "format"))
    with caplog.at_level(logging.WARNING):
        scores = built.score([sample("a"), sample("", index=5)])
    why = "reward term 'first': the grader is away"
    assert scores == [Score(1.0, {"first": 1.0, "format": 0.0}), Score(0.0, {}, unscorable=why)]
    assert [record.getMessage() for record in caplog.records] == [f"prompt 'p/1', sample 5 has no score: {why}"]


def test_few_samples_without_a_score_are_warnings_and_all_are_logged(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        reward("away").score([sample("", index=i) for i in range(5)])
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3 + ["INFO"] * 2


@pytest.mark.parametrize("function", ["away", "moody"])
def test_a_term_of_weight_0_costs_no_sample_its_score(function: str, caplog: pytest.LogCaptureFixture):
    """Whether it has no value or raises; the sample lacks it, and that is logged."""
    terms = [RewardTerm("watched", 0.0, f"answering_functions:{function}"), RewardTerm("format", 2.0)]
    built = build_reward(RewardConfig(terms, "watched", 600, "leave_out"))
    lost = {"away": "", "moody": "raises"}[function]
    with caplog.at_level(logging.WARNING):
        seen, unseen = built.score([sample("a"), sample(lost, index=5)])
    assert seen == Score(0.0, {"watched": 1.0, "format": 0.0})
    assert (unseen.total, unseen.terms, unseen.unscorable) == (0.0, {"format": 0.0}, "")
    why = {"away": "the grader is away", "moody": "LookupError: lost"}[function]
    assert unseen.reason.startswith("watched: ")
    assert why in unseen.reason
    (record,) = caplog.records
    said = "prompt 'p/1', sample 5 has no value of a term of weight 0: reward term 'watched': "
    assert record.getMessage().startswith(said)
    assert why in record.getMessage()


def test_a_reward_of_terms_of_weight_0_alone_is_0_whatever_fails():
    """As beside a reward model."""
    built = build_reward(
        RewardConfig([RewardTerm("watched", 0.0, "answering_functions:away")], "watched", model=RewardModelConfig("m"))
    )
    assert built.score([sample("")]) == [Score(0.0, {}, "watched: the grader is away")]


def test_a_sample_without_a_score_is_not_shown_to_further_terms():
    terms = [RewardTerm("first", 1.0, "answering_functions:away"), RewardTerm("count", 1.0, "hostile_functions:count")]
    built = build_reward(RewardConfig(terms, "count"))
    assert [score.terms for score in built.score([sample(""), sample("a")])] == [{}, {"first": 1.0, "count": 1.0}]


def test_options_of_a_function_are_its_arguments():
    assert [s.total for s in reward("both", bonus=0.5, words=["a"]).score([sample("a"), sample("b")])] == [1.5, 0.5]
    with pytest.raises(RuntimeError, match=r"'both', prompt 'p/1', sample 0: TypeError: .*'bonus'"):
        reward("both", words=[]).score([sample()])


@pytest.mark.parametrize(("number", "at_once"), [(1, 1), (40, 40), (100, 64)])
def test_async_functions_score_up_to_64_samples_at_once_in_order(number: int, at_once: int):
    scores = reward("together").score([sample(index=i) for i in range(number)])
    assert [score.total for score in scores] == [float(i) for i in range(number)]
    assert scores[-1].reason == f"together: {at_once}"


def test_functions_of_lists_get_all_samples_at_once():
    scores = reward("listed").score([sample(index=i) for i in range(3)])
    assert scores == [Score(float(i), {"listed": float(i)}, "listed: one of 3") for i in range(3)]
    assert [s.total for s in reward("listed_async").score([sample(index=i) for i in range(3)])] == [0.0, 1.0, 2.0]
    assert reward("listed").score([]) == []


@settings(max_examples=20)
@given(cuts=st.lists(st.integers(0, 12), max_size=5), texts=st.lists(st.sampled_from(["", "a", "bc"]), min_size=12))
def test_a_list_is_any_part_of_a_step_and_only_of_samples_that_the_term_can_have(
    listing: Reward, cuts: list[int], texts: list[str]
):
    """A function that scores each sample by itself gives every sample the same score, whatever is beside it."""
    samples = [sample(text, index, "words" if index % 3 else "sums") for index, text in enumerate(texts)]
    parts = [samples[start:end] for start, end in pairwise([0, *sorted(cuts), len(samples)])]
    scores = [score for part in parts for score in listing.score(part)]
    assert [bool(score.unscorable) for score in scores] == [text == "" for text in texts]
    for part, of_part in zip(parts, batched(scores, parts), strict=True):
        asked = [one for one in part if one.text and one.prompt.task == "words"]
        for one, score in zip(part, of_part, strict=True):
            assert score.terms.get("listed") == (float(one.index) if one in asked else None)
            assert ("listed: one of" in score.reason) == (one in asked)
            assert one not in asked or score.reason == f"listed: one of {len(asked)}"


def batched(scores: list[Score], parts: list[list[Sample]]) -> Iterator[list[Score]]:
    """The scores of each part."""
    rest = iter(scores)
    for part in parts:
        yield [next(rest) for _ in part]


@pytest.fixture(scope="module")
def listing() -> Reward:
    """A term that leaves samples without a score before one by a function of lists, which one of two tasks has."""
    away, listed = (RewardTerm(function=f"answering_functions:{name}") for name in ("away", "listed"))
    listed.tasks = ["words"]
    return build_reward(RewardConfig([away, listed], "away"))


def test_a_list_of_another_length_is_an_error():
    with pytest.raises(RuntimeError, match=r"'too_few', prompt 'p/1', sample 0: .* for a list of 3 samples"):
        reward("too_few").score([sample()] * 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raises", r"LookupError: lost\b.*answering_functions.py"),
        ("exits", "SystemExit: 0"),
        ("hangs", "no value within reward.timeout_seconds=1"),
        ("nan", "returned nan; a reward must be a finite number"),
    ],
)
@pytest.mark.parametrize("on_error", ["stop", "leave_out"])
def test_an_async_call_that_fails_leaves_the_others_their_scores(text: str, words: str, on_error: str):
    built = reward("moody", on_error, seconds=1 if text == "hangs" else 60)
    samples = [sample("a"), sample(text, index=1), sample("forks", index=2)]
    if on_error == "stop":
        with pytest.raises((RuntimeError, ValueError), match=rf"(?s)'moody', prompt 'p/1', sample 1: {words}"):
            built.score(samples)
    else:
        first, second, third = built.score(samples)
        assert first == third == Score(1.0, {"moody": 1.0})
        assert second.terms == {}
        assert words.partition("\\")[0] in second.unscorable


def test_a_fork_in_an_async_function_scores_no_other_samples(tmp_path: Path):
    told = tmp_path / "told"
    scores = reward("forks_at_once").score([sample(str(told), index=i) for i in range(5)])
    assert [score.total for score in scores] == [1.0] * 5
    assert sorted(told.read_text()) == ["0", "1", "2", "3", "4"]


def test_an_async_function_that_blocks_its_loop_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("grpo_mega.reward.user_functions.GRACE_SECONDS", 1.0)
    with pytest.raises(RuntimeError, match=r"(?s)'moody', prompt 'p/1', sample 0: no value within .*in moody"):
        reward("moody", seconds=1).score([sample("blocks")])


def test_a_process_that_ended_is_replaced_when_samples_are_left_out():
    built = reward("leaves_at", "leave_out")
    before, left, after = built.score([sample("a"), sample("leave", index=1), sample("b", index=2)])
    assert left.unscorable.startswith("reward term 'leaves_at': the process that runs the function ended with exit")
    assert after.unscorable == ""
    assert len({before.total, after.total, os.getpid()}) == 3
    (again,) = built.score([sample("c")])
    assert again.total == after.total


@pytest.mark.parametrize("function", ["kills_itself", "hangs", "writes_everywhere", "closes_all_files", "exits"])
def test_what_hurts_its_process_costs_only_its_sample(function: str):
    terms = [RewardTerm(function, 1.0, f"hostile_functions:{function}"), RewardTerm("format", 1.0)]
    built = build_reward(RewardConfig(terms, "format", 1.0, "leave_out"))
    for score in (*built.score([sample(), sample(index=1)]), *built.score([sample(index=2)])):
        assert score.terms == {}
        assert score.unscorable.startswith(f"reward term '{function}': ")
