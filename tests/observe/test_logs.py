"""Rank logs, seen from outside: each case is a process of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from forks import run_python

from grpo_mega.observe.logs import ENDS, TAIL, last_error

SETUP = """
import logging, pathlib, sys, threading, warnings
import torch.distributed
from grpo_mega.observe.logs import setup_rank_logging
setup_rank_logging(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
"""


def run_rank(path: Path, rank: int, body: str) -> tuple[str, subprocess.CompletedProcess[str]]:
    """What the rank's log holds after a process ran `body`, and how the process ended."""
    (path / "program.py").write_text(SETUP + body)
    done = run_python(path / "program.py", path, rank)
    return (path / "logs" / f"rank-{rank}.log").read_text(), done


@pytest.mark.parametrize("rank", [0, 3])
def test_who_says_what_where(tmp_path: Path, rank: int) -> None:
    body = """
for name in ("grpo_mega.trainer", "megatron.core.x", "torch.distributed.y"):
    logging.getLogger(name).info("info of " + name)
    logging.getLogger(name).warning("warning of " + name)
warnings.warn("a python warning")
"""
    log, done = run_rank(tmp_path, rank, body)
    assert done.returncode == 0
    lines = log.splitlines()
    assert all(f" rank {rank} " in line for line in lines if "of grpo_mega" in line)
    assert f"rank {rank} INFO grpo_mega.trainer: info of grpo_mega.trainer" in log
    for name in ("grpo_mega.trainer", "megatron.core.x", "torch.distributed.y"):
        assert f"WARNING {name}: warning of {name}" in log
    assert "info of megatron" not in log
    assert "info of torch" not in log
    assert "a python warning" in log
    expected = "WARNING grpo_mega.trainer: warning of grpo_mega.trainer\n" if rank == 0 else ""
    assert done.stderr == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_an_uncaught_exception_is_in_the_log_and_once_on_stderr(tmp_path: Path, rank: int) -> None:
    log, done = run_rank(tmp_path, rank, "def fails():\n    raise KeyError('layer 7')\nfails()\n")
    assert done.returncode == 1
    for text in (log, done.stderr):
        assert text.count("KeyError: 'layer 7'") == 1
        assert "in fails" in text
    assert f"rank {rank} CRITICAL uncaught" in log


def test_an_exception_in_a_thread_is_in_the_log(tmp_path: Path) -> None:
    body = "t = threading.Thread(target=lambda: 1 / 0, name='saver')\nt.start()\nt.join()\n"
    log, done = run_rank(tmp_path, 1, body)
    assert "CRITICAL uncaught: in saver" in log
    assert "ZeroDivisionError" in log
    assert "ZeroDivisionError" in done.stderr


def test_a_second_start_appends(tmp_path: Path) -> None:
    for start in ("first", "second"):
        log, _ = run_rank(tmp_path, 0, f"logging.getLogger('grpo_mega').info('{start} \\udcff start')\n")
    assert "first" in log
    assert "second" in log


def test_the_last_error_is_that_of_the_newest_start(tmp_path: Path) -> None:
    assert last_error(tmp_path) == ""
    log = tmp_path / "logs" / "rank-0.log"
    log.parent.mkdir()
    log.write_bytes(b"\xff" * (TAIL + 9) + b"\n2026 rank 0 INFO run: begins\n")
    assert last_error(tmp_path) == ""
    with log.open("a") as file:
        file.write(f"2026 rank 0 CRITICAL uncaught: {ENDS}rank 1: term 'a': ValueError: x\nTraceback:\n  rank 0: y\n")
    assert last_error(tmp_path) == "rank 1: term 'a': ValueError: x"
    with log.open("a") as file:
        file.write("2026 rank 0 INFO run: begins again\n")
    assert last_error(tmp_path) == ""
