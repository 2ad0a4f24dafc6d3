"""Where the time of a step goes: known traces give known parts, which add up to the step; the words name the bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traced import PHASES, Span, events

from grpo_mega.show.traces.trace_files import RankTrace
from grpo_mega.show.traces.waterfall import ADVICE, APART, PARTS, Waterfall, _spent, waits, waterfall


def of(ranks: list[list[Span]], samples: list[Span] | None = None, stage: str = "grpo") -> Waterfall:
    traces = [RankTrace(n, events(n, spans, samples or [] if n == 0 else [], stage)) for n, spans in enumerate(ranks)]
    found = waterfall(traces)
    assert found is not None
    return found


def seconds(found: Waterfall) -> dict[str, float]:
    return {part.name: round(part.seconds, 6) for part in found.parts}


STEP: list[Span] = [
    ("step", 100, 110),
    ("wait", 100, 100.5),
    ("generate", 100.5, 105),
    ("reward", 103, 104),
    ("term", 103.2, 103.7),
    ("wait", 103.7, 104),
    ("update", 105, 109),
    ("forward-backward", 105, 108),
    ("forward-recv", 105.5, 106),
    ("backward-recv", 107, 107.25),
    ("all-grads-sync", 107.75, 108),
    ("optimizer", 108, 109),
]


def test_the_innermost_span_counts() -> None:
    assert seconds(of([STEP])) == {
        "generation": 3.5, "reward": 0.7, "training": 3.0, "pipeline bubble": 0.75,
        "waiting for other ranks": 0.5 + 0.3 + 0.25, "other": 1.0,
    }  # fmt: skip


def test_waits_for_an_environment_are_no_part_of_the_rewards() -> None:
    without = seconds(of([STEP]))
    asked = seconds(of([[*STEP, ("environment", 103, 103.2)]]))
    assert asked.pop("environment") == 0.2
    assert asked == without | {"reward": 0.5}


def test_of_a_step_that_took_no_time_nothing_is_said() -> None:
    assert waterfall([RankTrace(0, events(0, [("step", 1, 1)]))]) is None


def test_evaluations_and_all_that_is_inside_of_them_are_no_part_of_a_step() -> None:
    with_evaluation: list[Span] = [*STEP, ("evaluate", 109, 110), ("wait", 109.1, 109.9), ("term", 109.2, 109.3)]
    found = of([with_evaluation])
    assert found.seconds == pytest.approx(9.0)
    assert seconds(found) == {n: s for n, s in seconds(of([STEP])).items() if n != "other"}


def test_the_tail_is_the_time_of_the_last_tenth_of_the_samples() -> None:
    samples: list[Span] = [(f"p #{n}", 100.5, 101 + 0.1 * n) for n in range(9)] + [("p #9", 100.5, 104.8)]
    found = seconds(of([STEP], samples))
    assert found["tail of generation"] == pytest.approx(104.8 - 101.8)
    assert found["generation"] == pytest.approx(3.5 - 3.0)


def test_samples_of_other_times_and_a_tail_longer_than_generation_do_not_count() -> None:
    outside: list[Span] = [("p #0", 90, 95), ("p #1", 90, 99), ("p #2", 106, 107)]
    assert "tail of generation" not in seconds(of([STEP], outside))
    late: list[Span] = [("p #0", 100.5, 100.6), ("p #1", 100.5, 105.0)]
    found = seconds(of([STEP], late))
    assert "generation" not in found
    assert found["tail of generation"] == 3.5


def test_seconds_are_means_over_ranks_and_medians_over_steps() -> None:
    def rank(*updates: float) -> list[Span]:
        spans: list[Span] = []
        for number, took in enumerate(updates):
            begin = 100.0 + 10 * number
            spans += [("step", begin, begin + 8), ("update", begin, begin + took), ("wait", begin + took, begin + 8)]
        return spans

    found = of([rank(8, 2, 8), rank(4, 8, 6)])
    assert seconds(found) == {"training": 6.0, "waiting for other ranks": 2.0}
    assert (found.steps, found.ranks, found.seconds, found.waits_least) == ([1, 2, 3], 2, 8.0, 0)


def test_the_phase_of_a_reward_model_is_training_where_it_is_what_is_trained() -> None:
    spans: list[Span] = [("step", 0, 2), ("reward_model", 0, 2)]
    assert seconds(of([spans])) == {"reward": 2.0}
    assert seconds(of([spans], stage="reward_model")) == {"training": 2.0}


def test_the_words_name_the_part_that_takes_most() -> None:
    for part, name in (("generation", "generate"), ("training", "update"), ("weight sync", "sync")):
        found = of([[("step", 0, 10), (name, 0, 7)]])
        assert found.bound.name == part
        assert f"bound by {part} (70% of 10 s): {ADVICE[part]}" in found.words
    waiting = of([[("step", 0, 10), ("wait", 0, 9)], [("step", 0, 10), ("wait", 0, 8)]])
    assert waiting.words.endswith("rank 1.")
    assert {*ADVICE} == {*PARTS}


def test_bars_begin_where_the_one_before_ends() -> None:
    found = of([[("step", 0, 10), ("generate", 0, 5), ("update", 5, 9.99)]])
    assert [line.count("█") for line in found.lines(10)] == [5, 5, 0]
    assert [line.find("█") for line in found.lines(10)] == [24, 29, -1]


def test_no_whole_step_is_no_waterfall() -> None:
    cut = [event for event in events(0, STEP) if not (event["ph"] == "E" and event["name"] == "step")]
    assert waterfall([RankTrace(0, cut)]) is None
    assert waterfall([]) is None
    assert waterfall([RankTrace(0, events(0, STEP))], range(2, 4)) is None


def test_what_ranks_wait_in() -> None:
    assert [waits(name) for name in ("wait", "reduce", "forward-recv", "update", "poll")] == [True] * 3 + [False] * 2


@given(st.data())
def test_parts_add_up_to_the_step_whatever_is_nested_in_what(data: st.DataObject) -> None:
    spans: list[Span] = [("step", 0.0, 64.0)]

    def fill(begin: int, end: int, depth: int) -> None:
        at = begin
        while depth < 4 and at < end and data.draw(st.booleans()):
            first = data.draw(st.integers(at, end - 1))
            last = data.draw(st.integers(first + 1, end))
            spans.append((data.draw(st.sampled_from([*sorted(PHASES - {"step"}), "wait", "poll", "x"])), first, last))
            fill(first, last, depth + 1)
            at = last

    fill(0, 64, 0)
    spent = _spent(RankTrace(0, events(0, spans)), "grpo", (0.0, 64e6))
    assert sum(spent.values()) == pytest.approx(64e6)
    inside = [(b, e) for n, b, e in spans if n == "evaluate"]
    merged = sum(any(b <= t < e for b, e in inside) for t in range(64))
    assert spent[APART] == pytest.approx(merged * 1e6)
