"""Slices that are simulated: whole completions are the planner's, no token is lost, none is older than the bound."""

from __future__ import annotations

import json
import math
import subprocess
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from composed import composed
from forks import run_python
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import REPOSITORY
from test_generation import MANY, ROOM, decoders

from grpo_mega import platform

platform.start()

from grpo_mega.errors import InputError  # noqa: E402
from grpo_mega.forecast.planning.generation import Decoder, EngineSet, completion_lengths, simulate  # noqa: E402
from grpo_mega.forecast.planning.hours import bound, warnings_of  # noqa: E402
from grpo_mega.forecast.planning.search import job_for  # noqa: E402
from grpo_mega.forecast.planning.slices import Lengths, SimulatedEngines, SimulatedStep, steady, steps  # noqa: E402
from grpo_mega.forecast.planning.strategies import assumed_lengths, lengths_of_run  # noqa: E402
from grpo_mega.forecast.planning.time import Assumed, StepTime, step_time  # noqa: E402
from grpo_mega.rollout.engine import SamplingParams  # noqa: E402
from grpo_mega.rollout.stream import Slices, Stream  # noqa: E402
from grpo_mega.types import Prompt, Score  # noqa: E402

LONGEST, PROMPT = 60, 10
DECODER = Decoder(5e9, 0.0, 0.0, 1e5, 1, 2e12, 0.0, 5e-3, 1e-5, 1e-5)
tables = st.lists(st.integers(1, LONGEST) | st.just(LONGEST), min_size=1, max_size=40).map(sorted)
alikes = st.floats(0, 1)
orders = st.sampled_from(["finished", "submitted"])


def engines(count: int = 1, room: float = ROOM, decoder: Decoder = DECODER) -> EngineSet:
    return EngineSet(count, decoder, PROMPT, room, MANY)


def first_steps(number: int, lengths: Lengths, slices: Slices, size: int, made: EngineSet) -> list[SimulatedStep]:
    return [*islice(steps(made, lengths, slices, size, LONGEST, slices.per_step), number)]


@given(decoders, tables, alikes, st.integers(1, 6), st.integers(1, 4), st.sampled_from([None, LONGEST]))
def test_whole_completions_take_as_long_as_without_a_stream(
    decoder: Decoder, table: list[int], alike: float, groups: int, size: int, tokens: int | None
) -> None:
    """Also in slices that no completion exceeds."""
    lengths = Lengths(table, alike)
    for number, step in enumerate(
        first_steps(3, lengths, Slices(tokens, groups, "finished", groups), size, engines(decoder=decoder))
    ):
        whole = [length for n in range(groups) for length in lengths.group(number * groups + n, size)]
        assert step.lengths == whole
        assert step.seconds == simulate(decoder, whole, PROMPT, ROOM, MANY).seconds
        assert (step.sampled, step.ages, step.in_flight) == (sum(whole), {0: sum(whole)}, 0)


@given(tables, alikes, st.integers(1, 4), st.integers(1, 20), st.integers(1, 3), st.sampled_from([500.0, ROOM]))
def test_every_token_is_sampled_once_and_completions_that_go_on_are_read_again(
    table: list[int], alike: float, size: int, tokens: int, count: int, room: float
) -> None:
    made, lengths = SimulatedEngines(engines(count, room)), Lengths(table, alike)
    stream = Stream(made, lambda samples: [Score(0.0, {})] * len(samples), size, gather=lambda each: [each()])
    whole = [lengths.group(number, size) for number in range(5)]
    stream.add(Prompt(str(n), (), "", "", "", {"lengths": group}) for n, group in enumerate(whole))
    slices = 0
    while stream.unfinished:
        stream.advance(SamplingParams(LONGEST, ()), slices, tokens)
        made.end_slice()
        slices += 1
    assert made.sampled == sum(map(sum, whole))
    assert slices == len(made.slowest) == -(-max(map(max, whole)) // tokens)
    if count == 1 and not made.evicted:
        begun = [range(0, length, tokens) for group in whole for length in group]  # of each slice of a completion
        assert [outcome.read for outcome in made.slowest] == [
            sum(PROMPT + slice_ * tokens for each in begun if slice_ < len(each)) for slice_ in range(slices)
        ]
    for group in stream.take().groups:
        for info, length in zip(group.infos, whole[int(group.prompt.id)], strict=True):
            assert info.segments == tuple((n * tokens, n) for n in range(-(-length // tokens)))
            assert info.finish_reason == ("length" if length == LONGEST else "stop")


@settings(max_examples=60)
@given(
    tables, alikes, st.integers(1, 3), st.integers(1, 4), st.integers(0, 4), st.integers(5, 70), orders,
    st.sampled_from([0, 1, 5]),
)  # fmt: skip
def test_no_token_is_older_than_the_bound_and_each_is_trained_once(
    table: list[int], alike: float, size: int, per_step: int, more: int, tokens: int, order: str, reserve: int
) -> None:
    slices, lengths = Slices(tokens, per_step + more, order, per_step, reserve=reserve), Lengths(table, alike)
    done = first_steps(8, lengths, slices, size, engines(2))
    assert max(max(step.ages) for step in done) <= slices.most_steps_late(LONGEST)
    for step in done:
        assert sum(step.ages.values()) == sum(step.lengths)
        assert all(step.slices)
    sampled, trained = (sum(step.sampled for step in done), sum(sum(step.lengths) for step in done))
    assert trained <= sampled <= trained + done[-1].in_flight * LONGEST
    if order == "submitted":
        whole = [length for number in range(8 * per_step) for length in lengths.group(number, size)]
        assert [length for step in done for length in step.lengths] == whole


def test_a_step_waits_for_the_slowest_engine_only() -> None:
    """Two groups on two engines take as long as the longer one alone."""
    lengths = Lengths([10, 50], 1.0)
    one, both = (first_steps(1, lengths, Slices(None, n, "finished", n), 4, engines(2))[0].seconds for n in (1, 2))
    assert {lengths.group(n, 4)[0] for n in (0, 1)} == {10, 50}
    assert both == simulate(DECODER, [50] * 4, PROMPT, ROOM, MANY).seconds >= one


def test_slices_gain_with_long_tails_and_without_a_tail_they_only_read_more() -> None:
    tail, level = Lengths(completion_table(400, 4000)), Lengths([400])
    gains = {}
    for name, lengths in (("tail", tail), ("level", level)):
        whole, sliced = (
            steady(engines(2), lengths, Slices(tokens, 64, "finished", 64), 8, 4000, 64) for tokens in (None, 100)
        )
        assert sliced.tokens == pytest.approx(whole.tokens)
        assert sliced.reading > 2 * whole.reading > 0
        gains[name] = whole.seconds / sliced.seconds
    assert gains["tail"] > 1.3
    assert gains["level"] < 1


def test_a_reserve_fills_the_places_of_short_completions() -> None:
    lengths, slices = Lengths(completion_table(400, 4000)), Slices(400, 64, "finished", 64)
    plain, filled = (steady(engines(2), lengths, replace(slices, reserve=n), 8, 4000, 64) for n in (0, 64))
    assert filled.tokens == plain.tokens
    assert plain.seconds / filled.seconds > 1.1


def completion_table(mean: float, longest: int) -> list[int]:
    return sorted(completion_lengths(512, mean, longest))


def distance(some: list[int], others: Sequence[int]) -> float:
    """The Kolmogorov-Smirnov statistic over its bound at 1 %: above 1, the two are unlikely to share a distribution."""
    one, two = sorted(some), sorted(others)
    at = ((bisect_right(one, value) / len(one), bisect_right(two, value) / len(two)) for value in {*one, *two})
    return max(abs(first - second) for first, second in at) / 1.628 * math.sqrt(1 / (1 / len(one) + 1 / len(two)))


@pytest.mark.parametrize(("share", "reserve"), [(0.5, 0), (1, 0), (1, 32)], ids=["half", "mean", "reserve"])
def test_a_run_learns_from_long_completions_as_often_as_they_are_drawn(share: float, reserve: int) -> None:
    """First steps take what finishes first, so short completions; later ones catch up with the tail, which is heavy."""
    lengths = Lengths(completion_table(400, 4000), 0.0)
    slices = Slices(round(400 * share), 192, "finished", 64, reserve=reserve)
    run = [step.lengths for step in islice(steps(engines(2), lengths, slices, 4, 4000, 64), 40)]
    drawn = [length for number in range(40 * 64) for length in lengths.group(number, 4)]
    trained = [length for step in run[15:] for length in step]
    assert distance(trained, drawn) < 1
    # That distance hardly sees a tail, which has most of the tokens.
    for part in (0.9, 0.98):
        least = sorted(drawn)[int(part * len(drawn))]
        tokens = [sum(x for x in one if x >= least) / sum(one) for one in (trained, drawn, run[0])]
        assert tokens[0] == pytest.approx(tokens[1], rel=0.15)
        assert tokens[2] < 0.7 * tokens[1]
    assert distance(run[0], drawn) > 1, "the measure would not notice a bias"


def test_some_engines_stand_for_all() -> None:
    """Of 4 engines with 2,048 samples, as of 16 with 8,192, a quarter of them is simulated."""
    lengths = Lengths(completion_table(15, LONGEST))
    few, many = (
        steady(engines(count), lengths, Slices(20, groups, "finished", groups), 16, LONGEST, groups, measured=2)
        for count, groups in ((4, 128), (16, 512))
    )
    assert (many.seconds, many.age, many.oldest, many.most) == (few.seconds, few.age, few.oldest, few.most)
    assert (many.tokens, many.in_flight) == (4 * few.tokens, 4 * few.in_flight)


@given(tables, st.integers(0, 1000), st.integers(1, 8))
def test_completions_that_are_fully_alike_have_one_length_and_all_are_of_the_table(
    table: list[int], number: int, size: int
) -> None:
    assert len({*Lengths(table, 1.0).group(number, size)}) == 1
    drawn = Lengths(table, 0.3).group(number, size)
    assert drawn == Lengths(table, 0.3).group(number, size)
    assert {*drawn} <= {*table}


@pytest.mark.parametrize("alike", [0.0, 0.5, 1.0])
def test_prompts_in_a_row_have_the_mean_of_all(alike: float) -> None:
    lengths = Lengths(completion_table(5000, 32768), alike)
    for first in (0, 1000):
        drawn = [length for number in range(first, first + 256) for length in lengths.group(number, 16)]
        assert sum(drawn) / len(drawn) == pytest.approx(lengths.mean, rel=0.05)


def run_of(folder: Path, groups: list[list[int]]) -> Path:
    """A run directory with two groups a step."""
    (folder / "samples").mkdir()
    for step, two in enumerate(zip(groups[::2], groups[1::2], strict=True)):
        lines = [json.dumps({"group": n, "tokens": tokens}) + "\n" for n in (0, 1) for tokens in two[n]]
        (folder / "samples" / f"step-{step:06d}.jsonl").write_text("".join(lines))
    return folder


@pytest.mark.parametrize("alike", [0.0, 0.6, 1.0])
def test_lengths_of_a_run_are_those_of_its_samples(alike: float, tmp_path: Path) -> None:
    groups = [Lengths(completion_table(300, 2000), alike).group(number, 8) for number in range(200)]
    found = lengths_of_run(run_of(tmp_path, groups), 1000)
    assert found.table == sorted(min(1000, length) for group in groups for length in group)
    assert found.alike == pytest.approx(alike, abs=0.1)


def test_of_a_long_run_the_newest_lengths_count(tmp_path: Path) -> None:
    assert {*lengths_of_run(run_of(tmp_path, [[7] * 16] * 400 + [[9] * 16] * 400), 1000).table} == {9}


@pytest.mark.parametrize(
    ("text", "where"),
    [(None, "--run "), ("", "--run "), ('{"group": 0, "tokens": 3}\n', "--run "), ("{\n", "step-000001.jsonl:1")]
    + [(f'{{"group": 0, "tokens": 3}}\n{line}\n', "step-000001.jsonl:2") for line in ("[]", "{}", '{"group": 0}')],
)
def test_a_folder_without_groups_of_samples_is_refused(text: str | None, where: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "samples").mkdir()
        (tmp_path / "samples" / "step-000001.jsonl").write_text(text)
    with pytest.raises(InputError) as error:
        lengths_of_run(tmp_path, 100)
    assert where in error.value.where


@pytest.mark.parametrize(
    ("figures", "where"),
    [
        ({"mean": 101.0}, "completions of 101 tokens on average"),
        ({"spread": -1.0}, "--spread -1"),
        ({"spread": float("nan")}, "--spread nan"),
        ({"alike": 1.5}, "--alike 1.5"),
        ({"alike": float("nan")}, "--alike nan"),
    ],
)
def test_figures_out_of_range_are_refused(figures: dict[str, float], where: str) -> None:
    with pytest.raises(InputError) as error:
        assumed_lengths(**({"mean": 50.0, "longest": 100} | figures))  # type: ignore[arg-type]
    assert error.value.where == where


SLICED = ["experiment=deepseekmath_7b", "algorithm.prompts_per_step=16", "algorithm.correction=truncate"]


def planned(*words: str) -> StepTime:
    job = job_for(composed(*SLICED, *words))
    return step_time(job, ROOM, job.config.rollout.max_new_tokens, Assumed(completion=200))


def test_the_planner_takes_slices_for_generation_and_nothing_else() -> None:
    whole, sliced = planned(), planned("rollout.slice_tokens=200")
    assert sliced.phases[1:] == whole.phases[1:]
    assert sliced.rollout.slowest.seconds == whole.phases[0].seconds
    assert sliced.rollout.sliced is not None
    assert sliced.phases[0].seconds == pytest.approx(sliced.rollout.sliced.seconds)
    assert sliced.phases[0].seconds < whole.phases[0].seconds
    assert any("more GPUs do not shorten" in line for line in warnings_of(whole))
    assert not warnings_of(sliced)
    assert bound(sliced)


def simulated(*words: str) -> subprocess.CompletedProcess[str]:
    return run_python(REPOSITORY / "tools" / "simulate.py", *words)


TINY = ["tiny", "cluster=h100", "rollout.max_new_tokens=40", "algorithm.correction=truncate", "rollout.slice_tokens=9"]


def test_the_command_compares_strategies_for_the_lengths_of_a_run(tmp_path: Path) -> None:
    folder = run_of(tmp_path, [Lengths(completion_table(12, 40)).group(number, 8) for number in range(20)])
    done = simulated(*TINY, "rollout.order=submitted", f"--run={folder}", "--steps=3", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    asked = [(row["slice_tokens"], row["order"], row["groups"]) for row in rows]
    mean = lengths_of_run(folder, 40).mean
    assert asked[:2] == [(None, "finished", 32), (9, "submitted", 32)]
    assert asked[-3:] == [(round(mean), "finished", groups) for groups in (32, 64, 32)]
    assert [(row["reserve"], row["ahead"]) for row in rows[-3:]] == [(32, False), (0, False), (0, True)]
    sizes = round(mean / 2), round(mean), round(2 * mean)
    assert {(size, order, 32) for size in sizes for order in ("finished", "submitted")} <= {*asked}
    assert all(row["oldest"] <= row["bound"] and row["gain"] > 0 for row in rows)
    assert rows[0] | {"gain": 1.0, "age": 0.0, "oldest": 0, "bound": 0, "in_flight": 0.0} == rows[0]
    assert rows[1]["gain"] == pytest.approx(rows[1]["speed"] / rows[0]["speed"])


def test_the_command_prints_a_table() -> None:
    done = simulated(*TINY, "--completion-tokens=10", "--spread=0.5", "--alike=0.2", "--steps=1")
    assert (done.returncode, done.stderr) == (0, "")
    first, _, names, whole, own, *_ = done.stdout.splitlines()
    assert first.startswith("tiny: completions have 10 tokens on average and at most 40")
    assert names.split()[:3] == ["slice", "order", "groups"]
    assert whole.split()[0] == "none"
    assert own.split()[:3] == ["9", "finished", "32"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "error: experiment=nothing: no such option"),
        ([*TINY, "--completion-tokens=41"], "error: completions of 41 tokens on average: "),
        ([*TINY, "--steps=0"], "error: --steps 0: "),
        ([*TINY, "--prompt-tokens=0"], "error: --prompt-tokens 0: "),
        ([*TINY, "--run=runs/nothing", "--alike=0.5"], "error: --run runs/nothing: the run gives the lengths"),
        (["tiny"], "error: cluster.gpu=null: "),
    ],
)
def test_the_command_refuses_what_it_cannot_simulate(words: list[str], said: str) -> None:
    done = simulated(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(said)


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [["r1zero_671b_h200"], ["r1zero_671b", "rollout.sglang.arguments.kv_cache_dtype=fp8_e4m3"]],
    ids=["h200", "h100 with a cache in fp8"],
)
def test_at_the_size_of_r1_zero_slices_of_the_mean_length_are_much_faster(words: list[str]) -> None:
    """docs/planner.md has the whole tables."""
    done = simulated(*words, "--completion-tokens=7800", "--spread=0.8", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    (plain,) = [row for row in rows if row["slice_tokens"] is None]
    sliced = [row for row in rows if row["slice_tokens"] == 7800]
    assert plain["gain"] == 1.0
    assert len(sliced) == 5
    assert all(row["gain"] >= 1.9 for row in sliced)


@pytest.mark.long
def test_a_plan_with_slices_prints_their_gain_and_the_bound() -> None:
    words = [*SLICED[1:], "rollout.slice_tokens=250", "--completion-tokens=200", "--explain"]
    done = run_python(REPOSITORY / "tools" / "plan.py", "deepseekmath_7b", *words)
    said = [line for line in done.stdout.splitlines() if line.startswith("slices of 250 tokens: ")]
    assert len(said) == 1, done.stderr
    assert "(bound: 9)" in said[0]  # 5 slices, each of which adds what a step takes, and 4
    assert "simulated with slices" in done.stdout
    assert "an engine gets up to 128 samples at once" in done.stdout  # 16 groups of 64 over 8 engines
    fuller = [*words[:3], "rollout.in_flight=32", "--completion-tokens=200", "--json"]
    planned = json.loads(run_python(REPOSITORY / "tools" / "plan.py", "deepseekmath_7b", *fuller).stdout)
    assert (planned["engine"]["samples"], planned["engine"]["waiting"]) == (256, 0)
    (kind,) = planned["time"]["kinds"]
    assert kind["slices"]["most_steps_late"] == 14 >= kind["slices"]["oldest"]
    assert kind["slices"]["without"] > kind["phases"][0]["seconds"]
