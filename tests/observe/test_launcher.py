"""A launcher can see from outside how far a rank is, which one failed first, and how it ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from limits import limit
from ranks import REPOSITORY

from grpo_mega.observe.launcher import PREFIX, Heartbeat, mark_failed, mark_refused
from grpo_mega.observe.timer import PhaseTimer
from grpo_mega.platform.stop import FailedElsewhere


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
    assert not mark_failed(KeyError("here"))
    assert Path(f"{prefix}.failed").read_text() == ""
    reported = RuntimeError("rank 1: KeyError: there")
    reported.__cause__ = FailedElsewhere()
    in_step = RuntimeError("failed in step 2")
    in_step.__cause__ = reported
    assert mark_failed(in_step)
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


WITHOUT_STREAMS = """
import sys
from grpo_mega.observe.launcher import open_streams
open_streams()
print("nobody reads"), print("this", file=sys.stderr), sys.stdin.read()
with open(sys.argv[1], "w") as file:
    file.write(str(file.fileno() > 2))
"""


def test_a_process_without_streams_writes_what_it_prints_into_no_file_of_its_own(tmp_path: Path) -> None:
    shell = ["sh", "-c", 'exec "$0" "$@" 0<&- 1>&- 2>&-']
    command = [*shell, sys.executable, "-c", WITHOUT_STREAMS, str(tmp_path / "file")]
    assert subprocess.run(command, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, timeout=limit(60)).returncode == 0
    assert (tmp_path / "file").read_text() == "True"


@pytest.mark.parametrize("code", [0, 3])
def test_a_process_whose_work_is_done_ends_with_its_code_although_nobody_reads_what_it_said(code: int) -> None:
    read, write = os.pipe()
    os.close(read)
    program = "import sys; from grpo_mega.observe.launcher import finish; sys.stdout = open(1, 'w'); print(1); "
    program += f"finish({code})"
    with os.fdopen(write, "wb", buffering=0) as nobody:
        ended = subprocess.run([sys.executable, "-c", program], stdout=nobody, cwd=REPOSITORY, timeout=limit(120))
    assert ended.returncode == code


@pytest.mark.parametrize("reason", [None, "KeyError: 'level'", ""])
def test_torchrun_repeats_at_its_end_why_a_rank_left(tmp_path: Path, reason: str | None) -> None:
    """A rank that left because of others gives no reason."""
    program = f"from grpo_mega.observe.launcher import leave\nleave('failed in step 2', 1, {reason!r})\n"
    (tmp_path / "leaves.py").write_text(program)
    words = ["torch.distributed.run", "--standalone", tmp_path / "leaves.py"]
    own = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *words]
    ended = subprocess.run(command, capture_output=True, text=True, env=own, timeout=limit(120))
    assert ended.stderr.startswith("failed in step 2\n")
    said = ended.stderr.rpartition("Root Cause")[2]
    assert (reason or "") in said
    assert ("failed in step 2" in said) == (reason is None)
    assert ("error_file: <N/A>" in said) == (reason == "")
