"""The page about a run that goes on: written beside training, and never older than what the run's end writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from train_jobs import SMALL, Job, rewarded_by


@pytest.mark.long
def test_a_page_comes_while_the_run_goes_on_and_the_last_one_is_of_its_end(tmp_path: Path) -> None:
    """The third step waits for the page that the second has begun, and keeps a copy of it."""
    run, seen = tmp_path / "runs" / "going", tmp_path / "seen.html"
    own = ["layout=single", "run.steps=4", "run.eval_every=0", "run.report_every=2", "run.name=going"]
    own += [rewarded_by("when_reported")]
    ended = Job(tmp_path, [*SMALL, *own], environment={"PAGE": f"{run}/report.html", "SEEN": str(seen)}).finish()
    assert (ended.code, ended.orphans) == (0, []), ended
    assert "the run is still going" in seen.read_text()
    assert "the run is still going" not in (run / "report.html").read_text()
    assert (run / "logs" / "report.log").read_text() == ""


@pytest.mark.long
def test_nothing_writes_a_page_for_a_run_that_was_killed(tmp_path: Path) -> None:
    """The page that the first step begins is mostly being written as the second one kills its rank."""
    own = ["layout=single", "run.steps=4", "run.eval_every=0", "run.report_every=1", "run.name=killed"]
    ended = Job(tmp_path, [*SMALL, *own, rewarded_by("killed")]).finish()
    assert ended.code == -9, ended
    assert ended.orphans == []
    page = tmp_path / "runs" / "killed" / "report.html"
    # On a busy machine the second step may take longer than the page of the first.
    assert not page.exists() or page.read_text().endswith("</html>\n")
