"""Pools of samples as tools/evaluate.py leaves them, of problems and answers that a test makes up."""

from __future__ import annotations

from array import array
from pathlib import Path

from grpo_mega.evaluate import results
from grpo_mega.types import Prompt, Sample, SampleInfo, Score

Drawn = tuple[str, int, str, float, float]
"""A sample: completion, tokens, finish reason, and the terms accuracy and language.

One below 0 is not there; without the second there is no score.
"""


def write_pool(folder: Path, problems: dict[str, list[Drawn]], task: str = "sums") -> Path:
    """The folder of a finished evaluation of these samples, written by what writes evaluations."""
    terms = [{"name": "accuracy", "tasks": ["sums", "math"]}, {"name": "language", "tasks": []}]
    results.open_folder(folder, {"weights": {}, "reward": {"terms": terms, "success": "accuracy"}})
    prompts = [Prompt(f"{i}", (1,), f"<bos>{asked}", "0", task, asked=asked) for i, asked in enumerate(problems)]
    for number, (prompt, drawn) in enumerate(zip(prompts, problems.values(), strict=True)):
        records = [results.record_of(*scored(prompt, index, of), None) for index, of in enumerate(drawn)]
        results.write_part(folder, number, records)
    results.collect(folder, prompts)
    results.write_results(folder, {})
    return folder


def scored(prompt: Prompt, index: int, drawn: Drawn) -> tuple[Sample, SampleInfo]:
    text, tokens, finish, accuracy, language = drawn
    terms = {"accuracy": accuracy, "language": language}
    score = Score(accuracy + language, {name: value for name, value in terms.items() if value >= 0})
    score = score if language >= 0 else Score(0.0, {}, unscorable="no answer")
    sample = Sample(prompt, index, array("i", [1] * tokens), array("f", [0.0] * tokens), finish, ((0, 0),), text)
    return sample, SampleInfo(tokens, finish, ((0, 0),), score)
