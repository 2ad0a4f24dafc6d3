"""The table of metrics: every name is found once, what it says is complete, and docs/metrics.md is what it says."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from ranks import REPOSITORY

from grpo_mega.observe.metric_page import page
from grpo_mega.observe.metric_table import SECTIONS, WORDS, find, unknown
from grpo_mega.observe.metrics import MetricsLog

NAMED = [
    (section, metric, f"{prefix}{metric.name}")
    for section in SECTIONS
    for metric in section.metrics
    for prefix in section.prefixes
]
EXAMPLES = {"{term}": "Own_2", "{task}": "gsm8k-hard", "{k}": "16"}


def test_the_document_is_made_of_the_table() -> None:
    written = (REPOSITORY / "docs" / "metrics.md").read_text()
    assert written == page(), "python -m grpo_mega.observe.metric_page > docs/metrics.md"


def test_the_document_has_every_metric_with_what_it_means() -> None:
    lines = page().splitlines()
    explained = []
    for section in SECTIONS:
        for metric in section.metrics:
            name = f"`{section.prefixes[0]}{metric.name}`"
            rows = [line for line in lines if line.startswith(f"| {name} |")]
            if not rows:  # an earlier section has this metric of another model
                assert metric in explained
                assert any(name in line for line in lines if line.startswith("Defined as in earlier sections: "))
                continue
            explained.append(metric)
            (row,) = rows
            assert len(re.split(r"(?<!\\)\|", row)) == 7, f"a table with five columns: {row}"
            assert metric.meaning.replace("|", r"\|") in row


def test_no_name_is_there_twice() -> None:
    assert not [name for name, count in Counter(name for _, _, name in NAMED).items() if count > 1]


@pytest.mark.parametrize(("metric", "name"), [(metric, name) for _, metric, name in NAMED])
def test_a_name_leads_to_its_metric(metric, name: str) -> None:
    for word, example in EXAMPLES.items():
        name = name.replace(word, example)
    assert find(name) is metric


def test_what_is_said_of_each_is_complete() -> None:
    assert EXAMPLES.keys() == WORDS.keys()
    for _, metric, name in NAMED:
        assert metric.good in ("up", "down", ""), name
        assert metric.meaning.endswith("."), name
        assert not re.search(r"\s\s|\n", metric.meaning + metric.taken), name


@pytest.mark.parametrize(
    "name",
    [
        "reward/", "reward/a/b", "rewards/mean", "xreward/mean", "reward/mean/x", "reward/mean\n", "policy/",
        "policy/kl2", "policyxkl", "eval/pass@", "eval/pass@x", "eval/heldout/a/b/accuracy", "eval/a/b/accuracy",
        "time/nap", "mean", "",
    ],
)  # fmt: skip
def test_what_nobody_defined_is_unknown(name: str) -> None:
    assert unknown(["reward/mean", name, "policy/kl"]) == [name]


def test_no_metric_is_there_that_no_source_names() -> None:
    own = ("metric_table.py", "metric_page.py")
    sources = [path.read_text() for path in (REPOSITORY / "grpo_mega").rglob("*.py") if path.name not in own]
    text = "\n".join(sources).replace("p{p}_abs", "p50_abs p90_abs p99_abs")
    names = {metric.name.rpartition("/")[2] for _, metric, _ in NAMED if metric.name not in WORDS}
    unwritten = [name for name in names if not re.search(rf"\b{re.escape(name)}(?!\w)", text)]
    assert not unwritten


def test_a_run_goes_on_with_a_metric_that_nobody_explained_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = MetricsLog(tmp_path, tensorboard=False, resume_from_step=-1)
    for step in (1, 2):
        log.write(step, {"policy/charm": 1.0, "reward/mean": 1.0})
    log.close()
    (said,) = (record.getMessage() for record in caplog.records)
    assert "policy/charm" in said
    assert (tmp_path / "metrics.jsonl").read_text().count("policy/charm") == 2
