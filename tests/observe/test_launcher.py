"""A launcher can see from outside how far a rank is, and which one failed first."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_mega.observe.launcher import PREFIX, Heartbeat, mark_failed, mark_refused
from grpo_mega.observe.timer import PhaseTimer
from grpo_mega.platform.failures import FailedElsewhere


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(PREFIX, str(tmp_path / "rank-0003"))
    return tmp_path / "rank-0003"


def test_every_phase_that_begins_is_one_more_beat(prefix):
    timer = PhaseTimer(Heartbeat())
    for phase in ("generate", "update", "generate"):
        with timer(phase):
            assert Path(f"{prefix}.beat").read_text().split()[1] == phase
    assert Path(f"{prefix}.beat").read_text().split() == ["3", "generate"]


def test_a_phase_that_gets_somewhere_gives_a_sign(prefix):
    timer = PhaseTimer(Heartbeat())
    timer.beat()
    with timer("generate"):
        timer.beat()
        timer.beat()
    timer.beat()
    assert Path(f"{prefix}.beat").read_text().split() == ["3", "generate"]


def test_a_short_name_after_a_long_one_leaves_nothing_of_it(prefix):
    heartbeat = Heartbeat()
    heartbeat("a-very-long-phase")
    size = Path(f"{prefix}.beat").stat().st_size
    heartbeat("b")
    assert Path(f"{prefix}.beat").read_text().rstrip() == "2 b"
    assert Path(f"{prefix}.beat").stat().st_size == size, "no more room is needed when a disk is full"


def test_a_failure_leaves_a_file_that_says_whether_it_is_that_of_other_ranks(prefix):
    mark_failed(KeyError("here"))
    assert Path(f"{prefix}.failed").read_text() == ""
    reported = RuntimeError("rank 1: KeyError: there")
    reported.__cause__ = FailedElsewhere()
    in_step = RuntimeError("failed in step 2")
    in_step.__cause__ = reported
    mark_failed(in_step)
    assert Path(f"{prefix}.failed").read_text() == "elsewhere\n"


def test_who_refuses_waits_for_the_others_and_not_for_ever(prefix):
    mark_refused(ranks=2, seconds=0)
    assert Path(f"{prefix}.refused").exists()
    prefix.with_name("rank-0001.refused").touch()
    mark_refused(ranks=2, seconds=600)


def test_without_a_launcher_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv(PREFIX, raising=False)
    monkeypatch.chdir(tmp_path)
    Heartbeat()("generate")
    mark_failed(KeyError("here"))
    mark_refused(ranks=2, seconds=600)
    assert list(tmp_path.iterdir()) == []
