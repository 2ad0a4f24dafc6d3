"""What traces say of a step is in the page's data; traces that cannot be read are no reason for no page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_mega.show.report.pack import pack
from grpo_mega.show.report.read import TRACED_RANKS, read_run


def traced(run: Path, rank: int, update: float) -> None:
    """A trace of one step of 10 s, `update` of which is an update, and the rest generation."""
    events = [
        {"ph": "B", "name": "step", "ts": 0.0, "args": {"step": 4, "stage": "grpo"}},
        {"ph": "X", "name": "update", "ts": 0.0, "dur": update * 1e6},
        {"ph": "X", "name": "generate", "ts": update * 1e6, "dur": (10 - update) * 1e6},
        {"ph": "E", "name": "step", "ts": 10e6},
    ]
    (run / "trace").mkdir(exist_ok=True)
    lines = [json.dumps({**event, "pid": rank, "tid": 0}) + ",\n" for event in events]
    (run / "trace" / f"rank-{rank:05d}.json").write_text("[\n" + "".join(lines))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_text('{"step": 4, "time/step": 10.0, "time/update": 7.0}\n')
    return tmp_path


def test_the_page_has_what_bounds_a_step(run: Path) -> None:
    for rank, update in ((0, 8.0), (1, 6.0)):
        traced(run, rank, update)
    found = pack([read_run(run)])["runs"][0]["time"]["traced"]
    assert {part["name"]: part["seconds"] for part in found["parts"]} == {
        "training": pytest.approx(7.0),
        "generation": pytest.approx(3.0),
    }
    assert found["words"].startswith("A step is bound by training (70% of 10 s)")
    assert found["about"] == "Steps 4 to 4, 2 ranks traced; medians over the steps."


def test_of_many_ranks_some_are_read_evenly_spread(run: Path) -> None:
    for rank in range(3 * TRACED_RANKS):
        traced(run, rank, 8.0 if rank % 3 == 0 else 0.0)
    found = read_run(run).waterfall
    assert found is not None
    assert found.ranks == TRACED_RANKS
    assert found.bound.seconds == pytest.approx(8.0)


WITHOUT_ARGS = '[\n{"ph":"B","name":"step","ts":1,"tid":0},\n{"ph":"E","name":"step","ts":2}'


@pytest.mark.parametrize("text", ["", "[\n", WITHOUT_ARGS])
def test_a_page_without_traces_and_with_broken_ones(run: Path, text: str) -> None:
    assert pack([read_run(run)])["runs"][0]["time"]["traced"] is None
    (run / "trace").mkdir()
    (run / "trace" / "rank-00000.json").write_text(text)
    assert pack([read_run(run)])["runs"][0]["time"]["traced"] is None
