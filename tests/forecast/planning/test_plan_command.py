"""tools/plan.py as a command: times, verdicts, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forks import run_python
from limits import limit
from ranks import REPOSITORY


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(REPOSITORY / "tools" / "plan.py", *arguments)


@pytest.mark.parametrize("tool", [pytest.param("tools/plan.py", marks=pytest.mark.long), "tools/data.py"])
def test_a_reader_that_leaves_early_ends_a_command_quietly(tool: str, tmp_path: Path) -> None:
    """As `| head` does."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    program = [sys.executable, REPOSITORY / tool, "tiny" if "plan" in tool else rows]
    paths = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "kernels")))
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes) as gone:
        done = subprocess.run(
            program, stdout=gone, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": paths},
            timeout=limit(120),
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_without_a_gpu_no_libraries_of_one_are_counted() -> None:
    assert json.loads(command("tiny", "--json").stdout)["total"][0] < 2e9


def test_the_command_prints_times_with_what_they_are_made_of(tmp_path: Path) -> None:
    """Two kinds of steps, as completions become longer; the phases add up to a step, and steps to the run."""
    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"prompt": "1 + 1", "answer": "2"}\n' * 40)
    words = ["rollout.longer_from_step=100", "rollout.longer_max_new_tokens=2000", "cluster.host_memory_gib=200"]
    words += [f"data.train_path={problems}", "run.steps=150", "--completion-tokens=256", "--explain"]
    done = command("deepseekmath_7b", *words)
    assert (done.returncode, done.stderr) == (1, "")
    assert "does not fit: " in done.stdout
    assert "90% of which may be planned; spread the model over more machines" in done.stdout
    lines = done.stdout.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("time on H100, if prompts have 200"))
    assert "completions on average 256 of 1,024 and 500 of 2,000" in lines[begin]
    rows = {line[:40].strip(): line[40:].replace(",", "").split() for line in lines[begin + 1 :]}
    phases = ["generation", "log-probs of the reference policy", "updates", "weights to the engines", "offload"]
    for column in (0, 1):
        total = sum(float(rows[phase][column]) for phase in phases)
        assert total == pytest.approx(float(rows["in all"][column]), abs=0.4)
    hours = (100 * float(rows["in all"][0]) + 50 * float(rows["in all"][1])) / 3600
    assert f"the run: {hours:,.1f} hours" in done.stdout
    assert "2,400 prompts, each of 40 problems 60.0 times" in done.stdout
    assert sum(line.startswith("what limits a step") for line in lines) == 2
    explained = done.stdout.split("how these are computed")[1]
    assert "a step with 1: max(" in explained
    assert "a checkpoint: 8 GPUs x 12 bytes of Adam's state per parameter / " in explained
    assert "MFLOP per token / (989 TFLOP/s x 0.62)" in explained


@pytest.mark.long
def test_the_command_says_that_an_engine_takes_more_than_there_is() -> None:
    done = command("experiment=moonlight_16b", "+rollout.sglang.arguments.mem_fraction_static=0.95")
    assert done.returncode == 1
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("does not fit")]
    assert said.startswith("does not fit: generation takes ")
    assert said.endswith("lower rollout.sglang.arguments.mem_fraction_static")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["qwen3_30b_a3b", "cluster.gpus_per_node=7"],
            "cluster.nodes=2 * cluster.gpus_per_node=7 = 14: not divisible by layout.tp=4",
        ),
        (["r1zero_700b"], "experiment=r1zero_700b: no such option; did you mean r1zero_671b? "),
        (
            ["deepseekmath_7b", "--completion-tokens", "4000"],
            "completions of 4000 tokens on average: not between 1 and the longest allowed, 1024",
        ),
        (["deepseekmath_7b", "cluster.gpu=h1000"], "cluster.gpu=h1000: unknown; choose one of h100, h200"),
    ],
)
def test_settings_that_cannot_run_are_refused(arguments: list[str], message: str) -> None:
    done = command(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
