"""What the page says of machines and experts: bounded, of whatever the run directory has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, WITHOUT, Browser, browser
from hypothesis import given
from hypothesis import strategies as st
from runs_made import lines, made_run, with_machines

from grpo_mega.show.report.machines import CELLS, MOST_STEPS, devices, experts, planned
from grpo_mega.show.report.page import write_report
from grpo_mega.show.report.read import RunData, read_run


def test_a_dense_run_without_traces_says_nothing_of_either(tmp_path: Path) -> None:
    run = read_run(made_run(tmp_path / "run"))
    assert (devices(run), experts(run)) == (None, None)


@pytest.mark.parametrize(
    ("engine", "whose"), [("embedded", ["trainer"] * 3), ("sglang", ["change", "engine", "trainer"])]
)
def test_sglang_has_the_devices_in_its_phases(tmp_path: Path, engine: str, whose: list[str]) -> None:
    found = devices(read_run(with_machines(made_run(tmp_path / "run", rollout={"engine": engine}))))
    assert found is not None
    assert [phase["owner"] for phase in found["phases"]] == whose
    assert found["shared"] == (engine == "sglang")
    assert found["seconds"] == 14.0, "from the beginning of step 7 to the end of step 8 on the later rank"
    assert found["steps"] == [[7, 0.0, 3.0], [8, 10.0, 13.0]]
    first, second = found["lanes"]
    assert first["spans"][:3] == [[0.0, 1.0, 0], [1.0, 2.0, 1], [2.0, 3.0, 2]]
    assert second["spans"][0] == [1.0, 2.0, 0]
    assert second["seconds"] == [2.0, 2.0, 2.0]
    assert found["most_gb"] == max(held for lane in found["lanes"] for _, held in lane["memory"]) == 8.4


def test_what_engines_hold_is_drawn_to_the_same_scale(tmp_path: Path) -> None:
    found = devices(read_run(with_machines(made_run(tmp_path / "run", rollout={"engine": "sglang"}), engine_gb=70.0)))
    assert found is not None
    assert found["lanes"][0]["engine_memory"] == [[0.0, 70.0], [10.0, 70.0]]
    assert found["most_gb"] == 70.0


def test_planned_steps_are_shown_beside_the_measured_ones(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    assert planned(read_run(run)) is None
    seconds = {"generate": [10.0, 12.5], "reward": [None, 1.0], "odd": "text", "step": [20.0, 25.0]}
    compared = {"gpu": "h100", "gpus": 8, "steps": [2, 3], "answer": 310.4, "seconds": seconds, "memory": [4e9, None]}
    (run / "planned.json").write_text(json.dumps(compared))
    assert planned(read_run(run)) == {
        "title": "Steps 2 and 3 as planned for 8 h100, and as measured; completions of 310 tokens",
        "rows": [["generate", 10.0, 12.5], ["reward", None, 1.0], ["step", 20.0, 25.0]],
        "memory": [4e9, None],
    }


def loads_of(run: Path) -> dict[str, Any] | None:
    return experts(read_run(run))


def test_loads_are_percent_of_the_average_expert(tmp_path: Path) -> None:
    found = loads_of(with_machines(made_run(tmp_path / "run")))
    assert found is not None
    assert found["steps"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [layer["layer"] for layer in found["layers"]] == [1, 2]
    assert found["layers"][0]["loads"] == [[100] * 8, [112, 125, 138, 150, 162, 175, 188, 200], [100] * 8, [100] * 8]


@pytest.mark.parametrize(("layers", "each", "steps"), [(58, 256, 256), (2, 4, 256), (1, 1, 1), (900, 300, 3)])
def test_what_the_page_holds_is_bounded_and_has_the_last_step(layers: int, each: int, steps: int) -> None:
    loads = {str(layer): [1.0] * each for layer in range(layers)}
    run = RunData(Path("run"), experts=[{"step": step, "loads": loads} for step in range(1, steps + 1)])
    found = experts(run)
    assert found is not None
    assert found["recorded"] == steps
    assert found["steps"][-1] == steps
    assert len(found["steps"]) <= MOST_STEPS
    assert len(found["steps"]) * layers * each <= CELLS


def test_a_line_with_more_experts_than_a_page_holds_is_left_out_and_said_to_be() -> None:
    loads = {str(layer): [1.0] * 4096 for layer in range(1 + CELLS // 4096)}
    run = RunData(Path("run"), experts=[{"step": 1, "loads": loads}])
    found = experts(run)
    assert found is not None
    assert (found["steps"], found["layers"]) == ([], [])
    assert (found["each"], found["room"]) == (4096 * (1 + CELLS // 4096), CELLS)
    whole = experts(run, cells=2 * CELLS)
    assert whole is not None
    assert whole["steps"] == [1]


def test_lines_of_another_model_and_damaged_ones_are_left_out(tmp_path: Path) -> None:
    run = with_machines(made_run(tmp_path / "run"))
    others = [
        {"step": 9, "loads": {"1": [1.0]}}, {"step": 10}, {"step": True, "loads": {"1": [1.0]}},
        {"step": 11, "loads": {"1": "x", "2": [1.0]}}, {"step": 12, "loads": {"x": [1.0]}}, {"step": 13, "loads": {}},
        {"step": 14, "loads": {"1": [1.0, None, 1.0, 1.0], "2": [1.0] * 4}}, {"step": 15, "loads": {"1": [-1.0]}},
    ]  # fmt: skip
    text = (run / "experts.jsonl").read_text()
    (run / "experts.jsonl").write_text(lines(others) + text + '{"step": 16, "loa')
    found = loads_of(run)
    assert found is not None
    assert found["steps"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert found["others"] == len(others)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2) | st.just("1"), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.dictionaries(st.sampled_from(["step", "loads"]), VALUES), max_size=4))
def test_whatever_the_lines_hold_is_no_error(records: list[dict[str, Any]]) -> None:
    json.dumps(experts(RunData(Path("run"), experts=records)), allow_nan=False)


@given(st.dictionaries(st.sampled_from(["seconds", "memory", "steps", "answer", "gpu"]), VALUES))
def test_whatever_was_compared_is_no_error(record: dict[str, Any]) -> None:
    json.dumps(planned(RunData(Path("run"), planned=record)), allow_nan=False)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip(WITHOUT)
    with browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


def test_the_page_draws_the_lanes_and_the_loads(page: Browser, tmp_path: Path) -> None:
    run = with_machines(made_run(tmp_path / "run", rollout={"engine": "sglang"}), engine_gb=70.0)
    compared = {"gpu": "h100", "gpus": 8, "steps": [2, 3], "seconds": {"sync": [9, 12.5]}, "memory": [4e9, 5e9]}
    (run / "planned.json").write_text(json.dumps(compared))
    write_report([read_run(run)], tmp_path / "page.html")
    page.open(tmp_path / "page.html")
    assert page.errors == []
    words = " ".join(page.run("document.getElementById('time').innerText").split())
    assert "Steps 2 and 3 as planned for 8 h100" in words
    assert "sync 9 s 12.5 s memory 4 GB 5 GB" in words
    assert page.run("document.querySelectorAll('#devices .lane').length") == 2
    assert page.run("document.querySelectorAll('#devices .spans i').length") == 12
    width = "((span) => span.getBoundingClientRect().width / span.parentElement.getBoundingClientRect().width)"
    assert page.run(f"{width}(document.querySelector('#devices .spans i'))") == pytest.approx(1 / 14, abs=0.005)
    assert "generate (engine)" in page.run("document.querySelector('#devices .legend').innerText")
    assert page.run("document.querySelectorAll('#devices .memory.of-engine i').length") == 4
    assert "below that the memory of its engine" in page.run("document.getElementById('devices').innerText")
    page.run("(() => { const layer = document.querySelector('#experts select'); layer.value = '2';"
             " layer.dispatchEvent(new Event('change')); })()")  # fmt: skip
    map_ = "document.querySelector('#experts canvas').getContext('2d')"
    darkness = f"((x, y) => {map_}.getImageData(x, y, 1, 1).data[3])"
    early, late, idle = (page.run(f"{darkness}({x}, {y})") for x, y in ((0, 1), (7, 1), (7, 0)))
    assert early < late
    assert (late, idle) == (255, pytest.approx(128, abs=2)), "twice the average, and the average"
    page.run("document.querySelector('#experts .map').focus()")
    page.press("ArrowLeft")
    page.press("ArrowDown")
    read = page.run("document.querySelector('#experts .read').textContent")
    assert read == "Step 8 · expert 1 · 2 times the average"


def test_what_the_page_leaves_out_it_says(page: Browser, tmp_path: Path) -> None:
    run = with_machines(made_run(tmp_path / "run"))
    loads = {str(layer): [1.0] * 4096 for layer in range(1 + CELLS // 4096)}
    (run / "experts.jsonl").write_text(lines([{"step": 7}, {"step": 8, "loads": loads}]))
    (run / "words.json").write_text(json.dumps(["experiment=tiny", "layout=single", "run.steps=8"]))
    alarms = [{"step": step, "name": f"alarm {step}", "message": "", "action": ""} for step in range(1, 104)]
    (run / "alarms.jsonl").write_text(lines([*alarms, {"step": 104}]))
    for rank in range(2, 20):
        (run / "trace" / f"rank-{rank:05d}.json").write_text((run / "trace" / "rank-00001.json").read_text())
    write_report([read_run(run)], tmp_path / "page.html")
    page.errors.clear()
    page.open(tmp_path / "page.html")
    assert page.errors == []
    text = page.run("document.body.innerText")
    for said in (
        "A step has the loads of 303,104 experts, and this page room for 300,000 numbers",
        "1 line of experts.jsonl is of another model, or damaged, and left out.",
        "3 later ones in alarms.jsonl.",
        "alarms.jsonl: 1 without a name or a step, left out",
        "7 of 20 ranks, evenly spread",
        "random weights → supervised fine-tuning (3 steps, 25 min) → reinforcement learning (8 steps",
        "Preset\ntiny\nOther than the preset\nlayout=single run.steps=8",
    ):
        assert said in text, said


def test_the_page_says_how_many_phases_it_leaves_out(
    page: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_mega.show.traces.lanes.MOST_SPANS", 4)
    run = with_machines(made_run(tmp_path / "run", rollout={"engine": "sglang"}))
    write_report([read_run(run)], tmp_path / "page.html")
    page.open(tmp_path / "page.html")
    assert page.errors == []
    assert "too short to be seen are left out" in page.run("document.getElementById('devices').innerText")
