"""tools/report.py: what it writes, what it says of runs that are not whole, and what it refuses."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from forks import run_python
from ranks import REPOSITORY
from runs_made import group, made_run

from grpo_mega.show.report.page import in_script, write_own_report


def report(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return run_python(REPOSITORY / "tools" / "report.py", *words)


def test_one_run_and_several(tmp_path: Path) -> None:
    runs = [made_run(tmp_path / name, samples={1: group(0, "2+3=?", [1.0], [["5"]])}) for name in ("a", "b")]
    done = report(runs[0])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{runs[0]}/report.html (")
    assert (runs[0] / "report.html").read_text().startswith("<!doctype html>")
    done = report(*runs, "--out", tmp_path / "both.html")
    assert (done.returncode, done.stderr) == (0, "")
    assert "<title>2 runs compared</title>" in (tmp_path / "both.html").read_text()


def test_what_is_missing_and_damaged_is_said(tmp_path: Path) -> None:
    run = made_run(tmp_path / "a")
    (run / "summary.json").unlink()
    (run / "metrics.jsonl").open("a").write("{oops}\n")
    done = report(run)
    assert done.returncode == 0
    assert f"{run}: summary.json: the run is still going, or was stopped before its end" in done.stderr
    assert f"warning: {run}/metrics.jsonl:11: not JSON, left out" in done.stderr


@pytest.mark.parametrize("words", [["absent"], ["."], ["a", "b"], ["a", "--out", "absent/report.html"]])
def test_what_cannot_be_is_refused(tmp_path: Path, words: list[str]) -> None:
    for name in ("a", "b"):
        made_run(tmp_path / name)
    done = report(*(word if word.startswith("--") else tmp_path / word for word in words))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_data_cannot_leave_their_element() -> None:
    text = in_script({"a": "</script><!--\u2028&amp;\ud800"})
    assert text.isascii()
    assert not {*text} & {*"<>&"}


def test_a_run_ends_well_without_its_page(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_own_report(tmp_path)
    assert f"{tmp_path}/report.html is not written: {tmp_path}: not a run directory" in caplog.text
    assert list(tmp_path.iterdir()) == []
    run = made_run(tmp_path / "a")
    (run / "report.html").mkdir()
    write_own_report(run)
    assert f"{run}/report.html is not written" in caplog.text
