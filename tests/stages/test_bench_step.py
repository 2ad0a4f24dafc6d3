"""tools/bench_step.py, started as its docstring and docs/benchmarks.md say: every measured step trains tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forks import run_python
from ranks import REPOSITORY, run_ranks

TOOL = REPOSITORY / "tools" / "bench_step.py"
SMALL = ["algorithm.prompts_per_step=2", "algorithm.group_size=4", "rollout.max_new_tokens=6"]


@pytest.mark.parametrize(
    ("ranks", "documented"),
    [
        (1, ["model.qk_norm=true"]),
        pytest.param(1, ["model.moe.experts=8", "model.moe.top_k=2"], marks=pytest.mark.long),
        pytest.param(2, ["layout=ep2", "model.moe.experts=8"], marks=pytest.mark.long),
        pytest.param(1, ["algorithm=ppo"], marks=pytest.mark.long),
    ],
    ids=["dense", "experts", "torchrun", "ppo"],
)
def test_every_measured_step_trains_the_same_tokens(ranks: int, documented: list[str], tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    options = ["--steps", "2", "--warmup", "1", "--json", str(result)]
    printed = run_ranks(TOOL, ranks, [*options, *documented, *SMALL])[0]
    measured = json.loads(result.read_text())
    # 2 prompts of 4 samples of 6 tokens, unless the checksum gave a whole group the same reward.
    assert measured["trained_tokens"] in (2 * 4 * 6, 4 * 6)
    assert {"generate", "reward", "logprobs", "update"} <= measured["phases"].keys()
    assert ("values" in measured["phases"]) == ("algorithm=ppo" in documented)
    assert all(spent["cpu"] > 0 for spent in measured["phases"].values())
    assert f"{measured['cpu_seconds_per_1000_trained_tokens']:.3f} CPU seconds per 1,000 trained tokens" in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "0"], "--steps=0: out of range; choose a value in [1, inf)"),
        (["--warmup", "-1"], "--warmup=-1: out of range; choose a value in [0, inf)"),
        (["--vocabulary", "0"], "--vocabulary=0: out of range; choose a value in [1, inf)"),
        (["--prompt-tokens", "0"], "--prompt-tokens=0: out of range; choose a value in [1, 64]"),
        (
            ["model.layers=2", "--prompt-tokens", "90", "rollout.max_new_tokens=60"],
            "--prompt-tokens=90: out of range; choose a value in [1, 68] (model.context less rollout.max_new_tokens)",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], said: str) -> None:
    done = run_python("tools/bench_step.py", *arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert f"error: {said}" in done.stderr
    assert "Traceback" not in done.stderr
