"""tools/rejection_sample.py --steps: which samples get labels, what these are, and that a run can read them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pools import scored, write_pool
from refusals import refused
from test_rejection_sampling import TOOL

from grpo_mega.config.schema import PairsConfig
from grpo_mega.data.labelled_steps import load_labelled_completions
from grpo_mega.data.tokenizer import CharTokenizer
from grpo_mega.evaluate import results
from grpo_mega.recipes.curation.continuing import begun_id, begun_of
from grpo_mega.recipes.curation.selection import open_pool
from grpo_mega.step_ends import beginnings
from grpo_mega.types import Prompt

SUM = [";", "</think>"]
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
    read = load_labelled_completions(tmp_path / "steps.jsonl", chars, (chars.eos_id,), 100, settings)
    assert [each.labels for each in read] == [(1, 1, 1), (1, 0, 0), (0, 1)]


def test_filters_and_limits_hold(tmp_path: Path) -> None:
    write_pool(tmp_path / "pool", PROBLEMS)
    _, rows, _ = run(tmp_path, "--keep", "language>=0.9", "--per-problem", "1")
    assert [row["completion"] for row in rows] == [RIGHT]


def write_continued(folder: Path, pool: Path, successes: dict[str, list[float]]) -> None:
    """Continuations of the first problem's samples from their beginnings, by what each came to; below 0: no score."""
    continues = {"pool": open_pool(pool).sha256, "separators": SUM}
    terms = [{"name": "accuracy", "tasks": []}]
    results.open_folder(folder, {"continues": continues, "reward": {"terms": terms, "success": "accuracy"}})
    prompts = [Prompt(begun_id("0", text), (1,), f"1+2+3=?{text}", "6", "sums", asked="1+2+3=?") for text in successes]
    for number, (prompt, values) in enumerate(zip(prompts, successes.values(), strict=True)):
        drawn = [scored(prompt, i, ("...", 3, STOP, value, value)) for i, value in enumerate(values)]
        results.write_part(folder, number, [results.record_of(*one, None) for one in drawn])
    results.collect(folder, prompts)
    results.write_results(folder, {})


BEGUN = {
    "<think>1+2=3;": [1.0, 0.0, 1.0, -1.0, 1.0],
    "<think>1+2=3;3+3=6</think>": [1.0, 1.0],
    "<think>1+2=3;3+3=7</think>": [0.0, 0.0, 0.0],
}


@pytest.mark.parametrize(("more", "first"), [([], 0.75), (["--hard"], 1.0)])
def test_continuations_label_steps(tmp_path: Path, more: list[str], first: float) -> None:
    """Of the first step three of four that were scored are right; a completion's end is as right as the whole."""
    write_pool(tmp_path / "pool", PROBLEMS)
    write_continued(tmp_path / "continued", tmp_path / "pool", BEGUN)
    code, rows, report = run(tmp_path, "--continued", str(tmp_path / "continued"), *more)
    assert code == 0
    assert {row["completion"]: row["labels"] for row in rows} == {
        RIGHT: [first, 1.0, 1.0],
        HALF: [first, 0.0, 0.0],
        "<answer>6</answer>": [1.0],
    }
    assert report["left_out"]["have steps without a label, or others than the separators divide"] == 2
    assert (report["hard"], [*report["continued"]]) == (bool(more), [str(tmp_path / "continued")])
    chars, settings = CharTokenizer(), PairsConfig(separators=SUM)
    read = load_labelled_completions(tmp_path / "steps.jsonl", chars, (chars.eos_id,), 100, settings)
    assert read[0].labels == (first, 1.0, 1.0)


def test_labels_are_compared_with_others_of_the_same_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two samples have two steps each before their last. A step whose continuations rarely succeed counts as wrong,
    so one of the four labels differs from the verifier's."""
    write_pool(tmp_path / "pool", PROBLEMS)
    write_continued(
        tmp_path / "continued", tmp_path / "pool", BEGUN | {"<think>1+2=3;3+3=6</think>": [0.0, 1.0, 0.0, 0.0]}
    )
    assert run(tmp_path)[0] == 0
    (tmp_path / "steps.jsonl").rename(tmp_path / "verified.jsonl")
    (tmp_path / "steps.report.json").unlink()
    words = ("--continued", str(tmp_path / "continued"), "--compare")
    code, _, report = run(tmp_path, *words, str(tmp_path / "verified.jsonl"))
    assert (code, report["compared"]) == (0, {"file": str(tmp_path / "verified.jsonl"), "steps": 4, "agree": 0.75})
    assert f"75.0% of 4 steps are as in {tmp_path / 'verified.jsonl'}" in capsys.readouterr().out
    fewer = json.dumps({"prompt": "1", "completion": "2", "steps": [1, 2], "labels": [1.0]}) + "\n"
    for content, message in (
        ("{}\n", "other.jsonl:1: not a row with prompt, completion"),
        (fewer, "1 labels of 2 steps"),
        ("", "has no completion of several steps"),
    ):
        other = tmp_path / "other.jsonl"
        other.write_text(content)
        (tmp_path / "steps.jsonl").unlink(missing_ok=True)
        (tmp_path / "steps.report.json").unlink(missing_ok=True)
        assert run(tmp_path, *words, str(other))[0] == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "steps.jsonl").exists()


def test_continuations_of_another_pool_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pool(tmp_path / "pool", PROBLEMS)
    write_pool(tmp_path / "other", {"1+2+3=?": PROBLEMS["1+2+3=?"][:2]})
    write_continued(tmp_path / "continued", tmp_path / "other", BEGUN)
    for folder, message in (("continued", "holds continuations of another pool"), ("other", "holds no continuations")):
        assert run(tmp_path, "--continued", str(tmp_path / folder))[0] == 2
        assert f"{tmp_path / folder}: {message}; make them with tools/evaluate.py" in capsys.readouterr().err


@given(st.lists(st.sampled_from(["1", "+", ";", ";;", " ", "</think>"]), min_size=1, max_size=12))
def test_a_tokenizer_reads_what_is_continued_as_it_was_written(parts: list[str]) -> None:
    """Every beginning is asked once, with the tokens of its problem and of itself."""
    text, chars = "".join(parts), CharTokenizer()
    prompt = Prompt("p", tuple(chars.encode("<bos>1+2=?")), "<bos>1+2=?", "3", "sums", asked="1+2=?")
    with TemporaryDirectory() as place:
        pool = open_pool(write_pool(Path(place) / "pool", {"1+2=?": [(text, 9, STOP, 1.0, 1.0)] * 2}))
        prompt = replace(prompt, id="0")
        if not beginnings(text, SUM):
            with refused("--separators ';' '</think>' | its steps"):
                begun_of(pool, [prompt], SUM, chars, 99)
            return
        found = begun_of(pool, [prompt], SUM, chars, 99)
    assert [begun.text for begun in found.values()] == [*dict.fromkeys(beginnings(text, SUM))]
    for begun in found.values():
        assert chars.decode(begun.asked.token_ids) == prompt.text + begun.text == begun.asked.text
        assert begun.prompt == prompt


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hard"], "--hard: is for --continued"),
        (["--continued", "a", "b"], "--continued: 2 folders for 1 pools"),
        (["--continued", "a", "--separators", ";"], "those of --continued are divided already"),
        (["--separators", "#"], "no sample has labels"),
        (["--compare", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--also", "x.jsonl"], "--also: adds rows for sft.path, and --steps writes"),
    ],
)
def test_what_cannot_be_done_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    write_pool(tmp_path / "pool", PROBLEMS)
    assert run(tmp_path, *options)[0] == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "steps.jsonl").exists()
