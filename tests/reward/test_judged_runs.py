"""Runs that a judge scores: one that is away now and then, and says now and then nothing that could be read."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
from scoring_server import serving
from train_jobs import SMALL, Job

from grpo_mega.observe.metrics import read_metrics

KEY = "sk-judge/+5f3c"


@pytest.mark.long
def test_what_a_judge_cannot_be_asked_or_does_not_say_is_counted_and_shown(tmp_path: Path) -> None:
    with serving() as server:
        judge = (
            f"{{name:judge,options:{{url:'{server.url}/moody/v1',model:m,key:JUDGE_KEY,retries:0,"
            "rubric:'{prompt}!!! {completion}'}}"
        )
        terms = f"reward.terms=[{{name:accuracy}},{{name:format,weight:0.2}},{judge}]"
        settings = [*SMALL, terms, "run.steps=2", "run.name=judged", "run.sample_groups_per_step=8"]
        ended = Job(tmp_path, settings, ranks=2, environment={"JUDGE_KEY": KEY}).finish()
        assert (ended.code, ended.orphans) == (0, []), ended.stderr
        asked = server.asked
    assert {request["model"] for request in asked} == {"m"}
    assert all(request["messages"][0]["content"].count("!!!") == 1 for request in asked)
    path = tmp_path / "runs" / "judged"
    steps = [record for record in read_metrics(path / "metrics.jsonl") if "reward/unscorable" in record]
    assert len(steps) == 2
    for record in steps:
        assert 0 < record["reward/unscorable"] < 32
        assert record["reward/judge"] == 3.0
    logs = "".join(file.read_text() for file in (path / "logs").glob("rank-*.log"))
    assert "has no score: reward term 'judge': " in logs
    assert "answered 500: " in logs
    assert "the judge's reply has no score: 'I cannot say.'" in logs
    shown = [json.loads(line) for file in (path / "samples").glob("*.jsonl") for line in file.read_text().splitlines()]
    assert any("judge: It is fine. Score: 1, no.\nScore: 3" in record.get("reason", "") for record in shown)
    assert all("judge" in record or record["unscorable"].startswith("reward term 'judge': ") for record in shown)
    written = [file.read_bytes() for file in path.rglob("*") if file.is_file()]
    assert not any(KEY.encode() in content for content in (*written, ended.stdout.encode(), ended.stderr.encode()))


@pytest.mark.long
def test_with_a_judge_that_is_never_there_a_run_ends_and_says_that_nothing_was_scored(tmp_path: Path) -> None:
    with socket.socket() as silent:  # has the port, so that nobody else does, and does not listen
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        judge = f"{{name:judge,options:{{url:'{url}',model:m,retries:0,rubric:'{{prompt}} {{completion}}'}}}}"
        terms = f"reward.terms=[{{name:accuracy}},{judge}]"
        ended = Job(tmp_path, [*SMALL, terms, "run.steps=3", "run.name=alone"], ranks=2).finish()
    assert (ended.code, ended.orphans) == (0, []), ended.stderr
    path = tmp_path / "runs" / "alone"
    steps = [record for record in read_metrics(path / "metrics.jsonl") if "reward/unscorable" in record]
    assert [record["reward/unscorable"] for record in steps] == [32, 32, 32]
    assert "nothing was learned from them: in the last one no completion could be scored" in ended.stderr
    assert re.search(r"\[first of 4, answer \d+, no score\]", ended.stderr)
    assert "reward 0.00" not in ended.stderr
    shown = [json.loads(line) for file in (path / "samples").glob("*.jsonl") for line in file.read_text().splitlines()]
    assert shown
    assert all(record["reward"] is None and "was given up" in record["unscorable"] for record in shown[8:])
