"""tools/rejection_sample.py --pairs: which samples are paired, and what is said of the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_rejection_sampling import TOOL, write_pool

from grpo_mega.config.schema import PairsConfig
from grpo_mega.data.examples import load_pairs
from grpo_mega.data.tokenizer import CharTokenizer

STOP, CUT = "stop", "length"
PROBLEMS = {
    "1+1=?": [("2", 1, STOP, 1.0, 1.0), ("3", 1, STOP, 0.0, 1.0), ("=2", 2, STOP, 1.0, 1.0), ("4", 1, STOP, 0.5, 1.0)],
    "2+2=?": [("4", 1, STOP, 1.0, 1.0), ("4", 1, STOP, 1.0, 1.0)],
    "3+3=?": [("7", 1, CUT, 0.0, 1.0), ("6", 1, STOP, 1.0, 1.0), ("8", 1, STOP, -1.0, -1.0)],
    "4+4=?": [("8", 1, STOP, 1.0, 0.2), ("9", 1, STOP, 0.0, 0.2)],
}


def run(folder: Path, *options: str) -> tuple[int, list[dict], dict]:
    out = folder / "pairs.jsonl"
    code = TOOL.main([str(folder / "pool"), "--pairs", "--output", str(out), *options])
    written = [json.loads(line) for line in out.read_text().splitlines()] if code == 0 else []
    report = out.with_suffix(".report.json")
    return code, written, json.loads(report.read_text()) if report.exists() else {}


def shown(rows: list[dict]) -> list[tuple[str, str, str]]:
    return [(row["prompt"], row["chosen"], row["rejected"]) for row in rows]


def test_a_right_answer_is_paired_with_a_wrong_one_of_the_same_problem(tmp_path: Path) -> None:
    write_pool(tmp_path / "pool", PROBLEMS)
    code, rows, report = run(tmp_path)
    assert code == 0
    expected = [("1+1=?", "2", "3"), ("1+1=?", "=2", "4"), ("4+4=?", "8", "9")]
    assert shown(rows) == expected
    assert report["pairs"] is True
    assert (report["samples"], report["problems"], report["problems_with_a_pair"]) == (11, 4, 2)
    assert report["output"]["rows"] == 3
    assert sum(report["left_out"].values()) + 2 * 3 == 11
    chars = CharTokenizer()
    pairs = load_pairs(tmp_path / "pairs.jsonl", chars, (chars.eos_id,), 100, PairsConfig())
    assert len(pairs) == 3


def test_filters_are_about_what_is_chosen(tmp_path: Path) -> None:
    write_pool(tmp_path / "pool", PROBLEMS)
    _, rows, _ = run(tmp_path, "--keep", "language>=0.9", "--per-problem", "1", "--begin", "-")
    assert shown(rows) == [("1+1=?", "-2", "-3")]


def test_without_a_pair_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pool(tmp_path / "pool", {"2+2=?": PROBLEMS["2+2=?"]})
    assert run(tmp_path)[0] == 2
    assert (
        "no two samples make a pair; generate more for each problem:\n2 samples of 1 problems"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "pairs.jsonl").exists()
