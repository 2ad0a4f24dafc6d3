"""A run directory is read as it is: no good line is lost, and what is missing or damaged is named."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs_made import group, lines, made_run

from grpo_mega.errors import InputError
from grpo_mega.show.report.page import BackgroundReport
from grpo_mega.show.report.read import evenly, read_run

damage = st.sampled_from([
    b"{", b"nonsense", b"[1, 2]", b"3", b"null", b"\xff\xfe", b'{"step": "one"}', b'{"step": true}', b"[" * 5000,
])  # fmt: skip


@given(st.lists(st.one_of(st.floats(allow_nan=False, allow_infinity=False), damage), max_size=30))
def test_no_good_line_is_lost(content: list[float | bytes]) -> None:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "metrics.jsonl"
        written = [
            json.dumps({"step": number, "reward/mean": value}).encode() if isinstance(value, float) else value
            for number, value in enumerate(content)
        ]
        file.write_bytes(b"".join(line + b"\n" for line in written))
        run = read_run(Path(folder))
    numbers = {number: value for number, value in enumerate(content) if isinstance(value, float)}
    good = {number: {"reward/mean": value} if abs(value) <= 1e300 else {} for number, value in numbers.items()}
    assert run.metrics == good
    assert len(run.damaged) == len(content) - len(good) + ({} in good.values())
    assert all(str(file) in what for what in run.damaged)


def test_damage_names_file_and_line(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", samples={1: group(0, "2+3=?", [1.0, 0.0], [["5"], ["6"]])})
    for file in (run / "metrics.jsonl", run / "samples" / "step-000001.jsonl"):
        file.write_text("{oops\n" + file.read_text() + '{"step": 9, "rew')
    read = read_run(run)
    said = "\n".join(read.damaged)
    assert f"{run}/metrics.jsonl:1: not JSON" in said
    assert f"{run}/metrics.jsonl:12: half-written last line" in said
    assert f"{run}/samples/step-000001.jsonl:1: not JSON" in said
    assert (len(read.metrics), read.samples.lines) == (9, 2)


def test_numbers_that_json_has_not_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        f'{{"step": 1, "a": NaN, "b": 1e999, "c": {"9" * 400}, "d": true, "e": 2}}\n'
    )
    assert read_run(tmp_path).metrics == {1: {"e": 2.0}}


def test_lines_of_one_step_are_put_together(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "a": 1}\n{"step": 2, "eval/heldout/accuracy": 0.5}\n')
    assert read_run(tmp_path).metrics == {2: {"a": 1.0, "eval/heldout/accuracy": 0.5}}


@pytest.mark.parametrize("lost", ["config.yaml", "metrics.jsonl", "summary.json", "samples/step-000001.jsonl"])
def test_what_is_missing_is_said(tmp_path: Path, lost: str) -> None:
    run = made_run(tmp_path / "run", samples={1: group(0, "2+3=?", [1.0, 0.0], [["5"], ["6"]])})
    assert read_run(run).missing == []
    (run / lost).unlink()
    assert [what.split(":")[0] for what in read_run(run).missing] == [lost.removesuffix("step-000001.jsonl")]


@pytest.mark.parametrize("settings", [{"trains": "reward_model"}, {"sample_groups_per_step": 0}])
def test_samples_that_no_run_like_this_writes_are_not_missing(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert read_run(made_run(tmp_path / "run", run=settings)).missing == []
    assert read_run(made_run(tmp_path / "other")).missing == ["samples/: no completions were recorded"]


@pytest.mark.parametrize(("name", "content"), [("config.yaml", "a: [1"), ("config.yaml", "[1]"), ("summary.json", "{")])
def test_a_damaged_object_is_said(tmp_path: Path, name: str, content: str) -> None:
    run = made_run(tmp_path / "run")
    (run / name).write_text(content)
    assert [what.split(": ")[0] for what in read_run(run).damaged] == [f"{run / name}"]


def test_groups_of_versions_without_numbers_are_those_of_a_problem(tmp_path: Path) -> None:
    records = [*group(0, "a", [1.0, 0.0], [["5"], ["6"]]), *group(1, "b", [1.0], [["7"]])]
    old = [{key: value for key, value in record.items() if key != "group"} for record in records]
    run = made_run(tmp_path / "run", samples={1: old, 2: records})
    assert [[len(each) for each in step.groups] for step in read_run(run).samples.steps] == [[2, 1], [2, 1]]


def test_another_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(InputError, match="not a run directory"):
            read_run(path)
    with pytest.raises(InputError, match=r"note: does not exist \(.*/ has notes\.txt\)"):
        read_run(tmp_path / "note")


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=80), st.integers(1, 20_000))
def test_chosen_steps_fit_and_have_the_ends(sizes: list[int], budget: int) -> None:
    chosen = evenly(dict(enumerate(sizes)), budget)
    assert chosen == sorted({*chosen})
    assert chosen[-1] == len(sizes) - 1
    assert len(chosen) == 1 or (chosen[0] == 0 and sum(sizes[step] for step in chosen) <= budget)
    if sum(sizes) <= budget:
        assert chosen == list(range(len(sizes)))


def test_followed_problems_are_apart(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    (run / "samples" / "followed-000000.jsonl").write_text(lines(group(0, "2+3=?", [1.0], [["5"]])))
    read = read_run(run)
    assert (read.followed.files, read.samples.files) == (1, 0)


@pytest.mark.parametrize(("every", "existed"), [(1, True), (1, False), (0, True)])
def test_the_page_of_an_earlier_start_is_replaced_or_removed(tmp_path: Path, every: int, existed: bool) -> None:
    run = made_run(tmp_path / "run")
    (run / "logs").mkdir(exist_ok=True)
    page = run / "report.html"
    if existed:
        page.write_text("of an earlier start")
    report = BackgroundReport(run, every)
    report.stage("", 0, 1)
    if report._writer:
        report._writer.wait()
    assert page.exists() == (every == 1 and existed)
    assert not page.exists() or page.read_text().endswith("</html>\n")
