"""The trace of a rank has what each process that scores for it was asked, when, and when it had answered."""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_mega.config.schema import RewardConfig, RewardTerm
from grpo_mega.judges.math import symbolic
from grpo_mega.judges.math.verify import equivalent
from grpo_mega.judges.sandbox import Sandbox, SandboxUnavailable
from grpo_mega.platform.clock import own_clock
from grpo_mega.platform.trace import Process, Trace, recording
from grpo_mega.reward.code import code_score
from grpo_mega.reward.compose import build_reward
from grpo_mega.show.traces.trace_files import read_traces
from grpo_mega.types import Prompt, Sample


def sample(index: int, text: str = "12", tests: Any = None) -> Sample:
    prompt = Prompt("p", (1,), "1+1=?", "2", "sums", {"tests": tests} if tests else {})
    return Sample(prompt, index, array("i", [2]), array("f", [0.0]), "stop", ((0, 0),), text)


def traced(path: Path) -> Trace:
    return Trace(path, Process(0, "rank 0", 1), own_clock(), 5, dict)


def told(path: Path) -> list[tuple[str, str, dict[str, Any]]]:
    """(row, name, about) of what other processes did for the rank."""
    (found,) = read_traces(path)
    rows = {e["tid"]: e["args"]["name"] for e in found.events if e["name"] == "thread_name" and e["tid"]}
    return [(rows[e["tid"]], e["name"], e["args"]) for e in found.events if e["ph"] == "X" and e.get("tid")]


def test_each_call_of_a_function_of_the_user(tmp_path: Path) -> None:
    term = RewardTerm("own", 1.0, "answering_functions:pair")
    reward = build_reward(RewardConfig([term], success="own"))
    with recording(traced(tmp_path)):
        reward.score([sample(0), sample(1)])
    calls = told(tmp_path)
    assert [(row, name, about["first"], about["samples"]) for row, name, about in calls] == [
        ("reward functions", "own", "p #0", 1),
        ("reward functions", "own", "p #1", 1),
    ]
    (process,) = {about["process"] for *_, about in calls}
    assert psutil.Process(process).ppid() == os.getpid()


def test_each_test_of_a_program(tmp_path: Path) -> None:
    tests = [{"stdin": "", "stdout": "5\n"}, {"stdin": "", "stdout": "6\n"}]
    try:
        made = Sandbox(boxes=1)
    except SandboxUnavailable as missing:
        pytest.skip(str(missing))
    with recording(traced(tmp_path)):
        code_score(sample(3, "```python\nprint(5)\n```\n", tests), sandbox=made)
    runs = told(tmp_path)
    assert [(row, name, about["sample"], about["number"], about["status"]) for row, name, about in runs] == [
        ("sandbox", "test", "p #3", 1, "exited"),
        ("sandbox", "test", "p #3", 2, "exited"),
    ]
    (process,) = {about["process"] for *_, about in runs}
    assert psutil.Process(process).ppid() == os.getpid(), "the same box"
    made.close()


def test_each_comparison_by_sympy(tmp_path: Path) -> None:
    symbolic.symbolically_equal.cache_clear()
    with recording(traced(tmp_path)):
        assert equivalent("x+1", "1+x")
    ((row, name, about),) = told(tmp_path)
    assert (row, name) == ("sympy", "compare")
    assert psutil.Process(about["process"]).ppid() == os.getpid()
    symbolic.close_workers()
