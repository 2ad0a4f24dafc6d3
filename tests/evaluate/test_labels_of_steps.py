"""tools/rejection_sample.py --steps: which samples get labels, what these are, and that a run can read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_rejection_sampling import TOOL, write_pool

from grpo_mega.config.schema import PairsConfig
from grpo_mega.data.labelled_steps import load_labelled_answers
from grpo_mega.data.tokenizer import CharTokenizer

STOP, CUT = "stop", "length"
RIGHT, HALF = "<think>1+2=3;3+3=6</think><answer>6</answer>", "<think>1+2=3;3+3=7</think><answer>7</answer>"
PROBLEMS = {
    "1+2+3=?": [
        (RIGHT, 9, STOP, 1.0, 1.0), (HALF, 9, STOP, 0.0, 1.0), (RIGHT, 9, STOP, 1.0, 1.0),
        (RIGHT[:20], 9, CUT, 0.0, 1.0),
        ("<answer>6</answer>", 3, STOP, 1.0, 1.0), ("<think>1+2=3;;3+3=6</think>", 9, STOP, 0.0, 1.0),
    ],
    "4+4=?": [("<think>4+4=9</think><answer>8</answer>", 9, STOP, 1.0, 0.2)],
}  # fmt: skip


def run(folder: Path, *options: str) -> tuple[int, list[dict], dict]:
    out = folder / "steps.jsonl"
    code = TOOL.main([str(folder / "pool"), "--steps", "--output", str(out), *options])
    written = [json.loads(line) for line in out.read_text().splitlines()] if code == 0 else []
    report = out.with_suffix(".report.json")
    return code, written, json.loads(report.read_text()) if report.exists() else {}


def test_the_verifier_labels_steps_and_the_success_the_answer(tmp_path: Path) -> None:
    write_pool(tmp_path / "pool", PROBLEMS)
    code, rows, report = run(tmp_path)
    assert code == 0
    assert [row["labels"] for row in rows] == [[1, 1, 1], [1, 0, 0], [0, 1]]
    assert rows[1]["steps"] == ["<think>1+2=3", "3+3=7", "<answer>7</answer>"]
    assert (report["steps"], report["samples"], report["output"]["rows"]) == (True, 7, 3)
    assert sum(report["left_out"].values()) + len(rows) == report["samples"]
    chars, settings = CharTokenizer(), PairsConfig(separators=[";", "</think>"])
    answers = load_labelled_answers(tmp_path / "steps.jsonl", chars, (chars.eos_id,), 100, settings)
    assert [answer.labels for answer in answers] == [(1, 1, 1), (1, 0, 0), (0, 1)]


def test_filters_and_limits_hold(tmp_path: Path) -> None:
    write_pool(tmp_path / "pool", PROBLEMS)
    _, rows, _ = run(tmp_path, "--keep", "language>=0.9", "--per-problem", "1")
    assert [row["completion"] for row in rows] == [RIGHT]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--separators", "#"], "no sample has labels"),
        (["--also", "x.jsonl"], "--also adds rows that are learned, and --steps writes none"),
    ],
)
def test_what_cannot_be_done_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    write_pool(tmp_path / "pool", PROBLEMS)
    assert run(tmp_path, *options)[0] == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "steps.jsonl").exists()
