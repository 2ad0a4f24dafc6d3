"""Completions whose steps have labels: what is read, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from grpo_mega.config.schema import PairsConfig
from grpo_mega.data.labelled_steps import LabelledCompletion, labelled_completions_of_files, load_labelled_completions
from grpo_mega.data.tokenizer import CharTokenizer
from grpo_mega.errors import InputError

CHARS = CharTokenizer()
ENDS = (CHARS.eos_id,)
SETTINGS = PairsConfig(separators=[";", "</think>"])


def line(number: int = 0, **changes: Any) -> dict[str, Any]:
    whole = f"<think>3+{number}=4;4+2=6</think><answer>6</answer>"
    steps = [f"<think>3+{number}=4", "4+2=6", "<answer>6</answer>"]
    return {"prompt": f"3+{number}+2=?", "completion": whole, "steps": steps, "labels": [1, 0.5, 0]} | changes


def write(folder: Path, *lines: object) -> Path:
    path = folder / "steps.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def load(path: Path, **settings: Any) -> list[LabelledCompletion]:
    return load_labelled_completions(path, CHARS, ENDS, 100, replace(SETTINGS, **settings))


def test_scores_are_read_at_the_last_token_of_each_step(tmp_path: Path) -> None:
    (completion,) = load(write(tmp_path, line(1, id="x")))
    assert completion.labels == (1, 0.5, 0)
    ids = completion.row.token_ids
    read = [CHARS.decode(ids[completion.prompt : end]) for _, end in completion.row.learned]
    assert read == [
        "<think>3+1=4", "<think>3+1=4;4+2=6", "<think>3+1=4;4+2=6</think><answer>6</answer><eos>",
    ]  # fmt: skip
    assert completion.where == f"{tmp_path}/steps.jsonl:1"


def test_a_separator_before_the_end_token_ends_no_further_step(tmp_path: Path) -> None:
    told = {"prompt": "4+5=?", "completion": "4+1;2;", "steps": ["4+1", "2"], "labels": [1, 0.5]}
    (completion,) = load(write(tmp_path, told))
    assert completion.labels == (1, 0.5)
    ends = [CHARS.decode(completion.row.token_ids[completion.prompt : end]) for _, end in completion.row.learned]
    assert ends == ["4+1", "4+1;2;<eos>"]


def test_steps_that_end_within_one_token_have_the_least_of_their_labels(tmp_path: Path) -> None:
    """Three of these four end within the token `1;2;3`."""
    tokenizer = CharTokenizer(["1;2;3"])
    told = {
        "prompt": "4+5=?",
        "completion": "4+1;2;3;5",
        "steps": ["4+1", "2", "3", "5"],
        "labels": [0.5, 0.25, 1, 0.75],
    }
    (completion,) = load_labelled_completions(write(tmp_path, told), tokenizer, ENDS, 100, SETTINGS)
    assert completion.labels == (0.25, 0.75)
    read = [tokenizer.decode(completion.row.token_ids[completion.prompt : end]) for _, end in completion.row.learned]
    assert read == ["4+1;2;3", "4+1;2;3;5<eos>"]


WRONG = [
    (line(labels=[1, 1]), "field 'labels' | 2 numbers for 3 steps"),
    (line(labels=[1, 1.01, 0]), "field 'labels', label 2 | write a number from 0 (wrong) to 1 (right)"),
    (line(labels=[1, 0, -0.1]), "label 3 | -0.1 is not in"),
    (line(labels=[1, 0, True]), "label 3 | True is not in"),
    ('{"prompt": "1", "completion": "2", "steps": ["2"], "labels": [NaN]}', "label 1 | nan is not in"),
    (line(labels=None), "field 'labels' | None is not a"),
    (line(labels=[1, 0, "+"]), "label 3 | '+' is not in"),
    (line(steps=["<think>3+0=4", "4+2=7", "<answer>6</answer>"]), "step 2 | in the completion"),
    (line(steps=["4+2=6", "<think>3+0=4", "<answer>6</answer>"]), "step | in the completion after step 1"),
    (line(steps=["<think>3+0=4", "", "<answer>6</answer>"]), "field 'steps', step 2 | write its text"),
    (line(steps=[]), "field 'steps' | steps"),
    (
        line(steps=["<think>3+0", "4+2=6", "<answer>6</answer>"]),
        "steps.jsonl:2: field 'steps' | '] end 3 at",
    ),
    (line(steps=["<think>3+0=4", "<answer>6</answer>"], labels=[1, 1]), "field 'steps' | 2 steps"),
    (line(completion=""), "field 'completion' | empty"),
    (line(prompt=None), "field 'prompt' | missing"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_a_line_that_is_none_is_named(tmp_path: Path, wrong: object, message: str) -> None:
    with refused(message) as raised:
        load(write(tmp_path, line(), wrong))
    assert f"{tmp_path}/steps.jsonl:2" in raised.value.where


def test_an_empty_or_missing_file_is_named(tmp_path: Path) -> None:
    with refused("steps.jsonl | the file is empty"):
        load(write(tmp_path))
    with pytest.raises(InputError, match=re.escape("none.jsonl: no such file of completions")):
        load(tmp_path / "none.jsonl")


def test_other_labels_are_other_completions(tmp_path: Path) -> None:
    def identity(label: float) -> str:
        path = write(tmp_path, *(line(n, labels=[1, label, 0]) for n in range(4)))
        pairs = replace(SETTINGS, path=str(path), warmup_steps=0, batch_size=2)
        return labelled_completions_of_files(pairs, 100, 0, CHARS, ENDS, lambda text: None).identity

    assert identity(0.5) == identity(0.5) != identity(0.25)
