"""A run whose functions, programs and services fail now and then goes on, and says what could not be scored and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from train_jobs import SMALL, Job

from grpo_mega.observe.metrics import read_metrics

FUNCTIONS = """
import os, time

def hostile(sample):
    kind = (sum(sample.token_ids) + sample.index) % 6
    if kind == 0:
        raise LookupError("nothing there")
    if kind == 1:
        os._exit(3)
    if kind == 2:
        return float("nan")
    if kind == 3 and sample.index == 1 and os.fork() == 0:
        time.sleep(1000)
    if kind == 4 and sample.index == 2:
        time.sleep(1000)
    print("x" * 1_000_000)
    return sum(sample.token_ids) % 7 / 7, f"of {len(sample.token_ids)} tokens"
"""


@pytest.mark.long
def test_whatever_fails_costs_its_samples_their_scores_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "hostile_rewards.py").write_text(FUNCTIONS)
    own = "{name:own,function:hostile_rewards:hostile}"
    settings = ["run.steps=2", "run.name=hostile", "reward.on_error=leave_out", "reward.timeout_seconds=2"]
    terms = f"reward.terms=[{{name:accuracy}},{{name:format,weight:0.2}},{own}]"
    ended = Job(tmp_path, [*SMALL, terms, *settings], ranks=2).finish()
    path = tmp_path / "runs" / "hostile"
    assert (ended.code, ended.orphans) == (0, []), ended.stderr
    steps = [record for record in read_metrics(path / "metrics.jsonl") if "reward/unscorable" in record]
    assert len(steps) == 2
    for record in steps:
        assert 0 < record["reward/unscorable"] < 32
        assert 0 <= record["reward/own"] <= 1
    logs = "".join(file.read_text() for file in (path / "logs").glob("rank-*.log"))
    for words in ("LookupError: nothing there", "ended with exit code 3", "returned nan"):
        assert words in logs
    shown = [json.loads(line) for file in (path / "samples").glob("*.jsonl") for line in file.read_text().splitlines()]
    assert any("own: of " in record.get("reason", "") for record in shown), shown[0]
    assert all("own" in record or record["unscorable"].startswith("reward term 'own': ") for record in shown)
