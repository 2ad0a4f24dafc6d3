"""experts.jsonl: the load of every expert, in a file that is bounded however long the run is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.observe.experts import EXPERTS, FEWEST_LINES, MOST_BYTES, MOST_LINES, ExpertLog, spacing


def recorded(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / EXPERTS).read_text().splitlines()]


def loads(step: int) -> dict[str, list[float]]:
    return {"1": [float(step), 1.0, 0.0], "3": [0.0, 0.0, 0.0]}


def test_loads_are_over_those_of_the_average_expert(tmp_path: Path) -> None:
    ExpertLog(tmp_path, -1).write(4, {"1": [10.0, 20.0, 30.0], "2": [0.0, 0.0, 1.0]})
    assert recorded(tmp_path) == [{"step": 4, "loads": {"1": [0.5, 1.0, 1.5], "2": [0.0, 0.0, 3.0]}}]


def test_a_dense_model_leaves_no_file(tmp_path: Path) -> None:
    ExpertLog(tmp_path, -1).write(1, {})
    assert not (tmp_path / EXPERTS).exists()


def test_a_long_run_keeps_evenly_spread_steps_from_its_beginning_on(tmp_path: Path) -> None:
    log = ExpertLog(tmp_path, -1)
    for step in range(1, 2 * MOST_LINES + 101):
        log.write(step, loads(step))
    steps = [line["step"] for line in recorded(tmp_path)]
    assert steps == list(range(4, 2 * MOST_LINES + 101, 4))


def test_steps_that_run_again_have_one_line_and_a_half_written_one_is_gone(tmp_path: Path) -> None:
    log = ExpertLog(tmp_path, -1)
    for step in (1, 2, 3, 4):
        log.write(step, loads(step))
    with (tmp_path / EXPERTS).open("a") as file:
        file.write('{"step": 5, "lo')
    again = ExpertLog(tmp_path, 2)
    for step in (3, 4, 5):
        again.write(step, loads(step))
    assert [line["step"] for line in recorded(tmp_path)] == [1, 2, 3, 4, 5]
    ExpertLog(tmp_path, -1)
    assert recorded(tmp_path) == []


@given(st.integers(1, 10**6), st.integers(1, 10**5))
def test_the_lines_that_are_kept_are_bounded(step: int, experts: int) -> None:
    every = spacing(step, experts)
    kept = step // every
    assert kept <= MOST_LINES
    assert kept * experts * 6 <= MOST_BYTES or kept <= FEWEST_LINES
    assert every == 1 or spacing(-(-step // 2), experts) == every // 2, "no more is left out than must be"
