"""Whatever works for a process that is killed ends as well; what nobody asked to end does not."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from limits import limit
from processes import left, there

JOB = str(Path(__file__).with_name("orphans_job.py"))
DEADLINE = limit(300)
"""Seconds after which processes that do not come up count as hung."""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[subprocess.Popen]]:
    """Programs to end after the test, and whatever came of them."""
    programs: list[subprocess.Popen] = []
    yield programs
    there = [int(file.name.split("-")[1]) for file in tmp_path.glob("*-*")]
    for pid in [*(program.pid for program in programs), *there]:
        with contextlib.suppress(psutil.Error):
            if JOB in " ".join(psutil.Process(pid).cmdline()):
                os.kill(pid, signal.SIGKILL)
    for program in programs:
        program.wait()


def wait_for(folder: Path, roles: dict[str, int]) -> dict[str, list[psutil.Process]]:
    """The processes of each role, when so many of each are there."""
    deadline = time.monotonic() + DEADLINE
    while any(len(list(folder.glob(f"{role}-*"))) < count for role, count in roles.items()):
        assert time.monotonic() < deadline, sorted(file.name for file in folder.iterdir())
        time.sleep(0.02)
    return {role: there(int(f.name.split("-")[1]) for f in folder.glob(f"{role}-*")) for role in roles}


def said(folder: Path, role: str) -> list[str]:
    """The signal at its parent's end, and the number of threads, of each process of a role."""
    return [file.read_text() for file in folder.glob(f"{role}-*")]


def test_child_ends_with_its_parent(tmp_path, started):
    started.append(subprocess.Popen([sys.executable, JOB, "parent", tmp_path]))
    found = wait_for(tmp_path, {"parent": 1, "child": 1})
    started[0].kill()
    assert left(found["child"]) == []


def test_child_whose_parent_ended_before_it_asked_ends_at_once(tmp_path, started):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    started.append(subprocess.Popen([sys.executable, JOB, "child", tmp_path, str(gone.pid)]))
    assert started[0].wait(DEADLINE) == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_forks_and_their_forks_end_with_the_process_that_wants_it_and_later_ones_do_not(tmp_path, started):
    started.append(subprocess.Popen([sys.executable, JOB, "forker", tmp_path]))
    found = wait_for(tmp_path, {"forker": 1, "child": 1, "grandchild": 1, "later": 1})
    started[0].kill()
    assert left([*found["child"], *found["grandchild"]]) == []
    assert said(tmp_path, "later") == ["0 1"]
    assert found["later"][0].is_running()


def test_ranks_end_with_torchrun_also_when_a_script_of_its_starts_them(tmp_path, started):
    """The first rank is torchrun's own child, the second a shell's, which has another command to run after it."""
    rank = f"{sys.executable} {JOB} rank {tmp_path}"
    script = f'if [ "$RANK" = 0 ]; then exec {rank}; fi; {rank}; exit 3'
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    started.append(subprocess.Popen([*torchrun, "bash", "-c", script], stderr=subprocess.DEVNULL))
    ranks = wait_for(tmp_path, {"rank": 2})["rank"]
    assert sorted(rank.ppid() == started[0].pid for rank in ranks) == [False, True]
    started[0].kill()
    assert left(ranks) == []


def test_process_that_torchrun_did_not_start_outlives_its_shell(tmp_path, started):
    script = f"{sys.executable} {JOB} rank {tmp_path}; exit 3"
    started.append(subprocess.Popen(["bash", "-c", script], start_new_session=True))
    (process,) = wait_for(tmp_path, {"rank": 1})["rank"]
    started[0].kill()
    started[0].wait()
    assert said(tmp_path, "rank") == ["0 1"]
    assert process.is_running()
