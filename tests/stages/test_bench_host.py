"""tools/bench_host.py: a rank's memory grows with what it computes, not with the rollout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from forks import run_python
from ranks import REPOSITORY, limit


def long(*case: object) -> object:
    """A case that is left to the long suite: another of its kind is in `make test`."""
    return pytest.param(*case, marks=pytest.mark.long)


@pytest.mark.long
def test_a_rank_holds_what_it_computes_and_not_the_rollout(tmp_path: Path) -> None:
    """Of the same rollout one replica of eight needs far less than the only one; both rows are in the table."""
    result = tmp_path / "result.json"
    arguments = ["--samples", "512", "--replicas", "1", "8", "--mean", "2000", "--json", str(result)]
    command = [sys.executable, str(REPOSITORY / "tools" / "bench_host.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit(300))
    assert done.returncode == 0, done.stderr
    alone, shared = json.loads(result.read_text())
    assert alone["tokens"] == shared["tokens"] > 900_000
    assert alone["tokens_here"] == alone["tokens"] + 512 * 200  # prompts of 200 tokens
    assert shared["tokens_here"] < alone["tokens_here"] / 6
    assert (
        set(alone["peak"])
        == set(alone["seconds"])
        == {"completions", "batch", "schedule", "updates", "metrics", "stop"}
    )
    # 25 bytes of columns for each token here, four times over in copies, and a few megabytes for all others'
    # completions: 12 to 17 of the process's memory over many runs, as its allocator keeps more or less.
    assert max(shared["peak"].values()) < 100 * shared["tokens_here"] + 20e6 < max(alone["peak"].values())
    assert len(done.stdout.splitlines()) == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--samples", "100"], "--samples=100: not divisible by algorithm.group_size=16; choose 96 or 112"),
        (["--mean", "40000"], "--mean=40000: out of range; choose a value in [1, 32768]"),
        (["layout"], "layout: not a setting; write FIELD=VALUE"),
        long(["--samples", "8"], "--samples=8: not divisible by algorithm.group_size=16; choose 16"),
        long(
            ["experiment=tiny", "--samples", "100"],
            "--samples=100: not divisible by algorithm.group_size=8; choose 96",
        ),
        long(["--samples", "128", "0"], "--samples=0: out of range; choose a value in [1, inf)"),
        long(["--replicas", "0"], "--replicas=0: out of range; choose a value in [1, inf)"),
        long(["--mean", "0"], "--mean=0: out of range; choose a value in [1, 32768]"),
        long(
            ["--replicas", "8", "algorithm.group_size=0"],
            "algorithm.group_size=0: out of range; choose a value in [1, inf)",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], said: str) -> None:
    done = run_python("tools/bench_host.py", *arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_settings_stand_behind_the_sizes(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    sizes = ["--mean", "50", "--samples", "16", "24", "--replicas", "2"]
    done = run_python("tools/bench_host.py", "--json", str(result), *sizes, "experiment=tiny", "layout=single")
    assert done.returncode == 0, done.stderr
    assert [(row["samples"], row["replicas"]) for row in json.loads(result.read_text())] == [(16, 2), (24, 2)]
