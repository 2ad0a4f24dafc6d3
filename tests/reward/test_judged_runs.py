"""Runs that a judge scores: one that is away now and then, and says now and then nothing that could be read."""

from __future__ import annotations

import json
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
        settings = [*SMALL, terms, "run.steps=2", "run.name=judged", "run.samples_per_step=8"]
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
