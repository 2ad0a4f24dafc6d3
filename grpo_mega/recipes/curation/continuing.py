"""Continuations of completions after each step, from which labels of steps follow (Math-Shepherd).

Wang et al., 2023 (arXiv 2312.08935, section 3.2): a step is as good as the answers it leads to. A model continues each
completion of a pool several times after each of its steps, and the continuations are scored as whole completions. The
step's label is the share of correct ones (soft estimation, equation 4), or whether any is correct (hard estimation,
equation 3).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_mega.data.chat import Turn
from grpo_mega.data.tokenizer import Tokenizer
from grpo_mega.errors import InputError
from grpo_mega.evaluate.results import CONTINUES, Record
from grpo_mega.recipes.curation.selection import SamplePool, is_text, open_pool, records_of
from grpo_mega.step_ends import beginnings, step_ends
from grpo_mega.types import Prompt, Sample, Score


@dataclass(frozen=True)
class Begun:
    """The beginning of a completion, to be continued.

    Attributes:
        prompt: The problem.
        text: The completion so far.
        asked: Prompt for the model: the problem with the completion so far, under its own id.
    """

    prompt: Prompt
    text: str
    asked: Prompt


def begun_of(
    pool: SamplePool, prompts: Sequence[Prompt], separators: Sequence[str], tokenizer: Tokenizer, context: int
) -> dict[str, Begun]:
    """Beginnings to continue, by id: those of every completion of a pool that ended by itself and has a score.

    Equal beginnings are continued once. A beginning that leaves no room in `context` tokens, and a completion with
    characters that are not allowed in text, are left out; a completion with such a beginning gets no labels.

    Raises:
        InputError: The pool has problems that are not among `prompts`, or there is nothing to continue.
    """
    known = {prompt.id: prompt for prompt in prompts}
    by_id: dict[str, Begun] = {}
    for _, record in records_of(pool):
        if record["problem"] not in known:
            raise InputError(
                f"problem {record['problem']!r} of {pool.folder}",
                "not among the problems of this command",
                "give the --train or --data of the command that made the pool",
            )
        if record["finish_reason"] != "stop" or record.get("unscorable") or not is_text(record["completion"]):
            continue
        for text in beginnings(record["completion"], separators):
            prompt = known[record["problem"]]
            asked = prompt.asked if isinstance(prompt.asked, str) else [Turn(**turn) for turn in prompt.asked]
            # Encoded after the prompt, as the completion was sampled: alone, the text might have other tokens.
            tokens = (*prompt.token_ids, *tokenizer.answered(asked, text)[1])
            if len(tokens) < context:
                name = begun_id(prompt.id, text)
                shown = replace(prompt, id=name, token_ids=tokens, text=prompt.text + text)
                by_id.setdefault(name, Begun(prompt, text, shown))
    if not by_id:
        raise InputError(
            f"--separators {' '.join(map(repr, separators))}",
            f"divide no completion of {pool.folder} that ended by itself and has a score",
            "give the text between its steps",
        )
    return by_id


def begun_id(problem: str, text: str) -> str:
    """Id of a beginning of a completion of a problem."""
    return f"{problem} / {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def scored_whole(
    score: Callable[[Sequence[Sample]], Sequence[Score]], begun: Mapping[str, Begun]
) -> Callable[[Sequence[Sample]], Sequence[Score]]:
    """Scores continuations as whole completions, by text; token counts are those of the continuation only."""

    def scores(samples: Sequence[Sample]) -> Sequence[Score]:
        of = [begun[sample.prompt.id] for sample in samples]
        return score([replace(s, prompt=b.prompt, text=b.text + s.text) for s, b in zip(samples, of, strict=True)])

    return scores


@dataclass(frozen=True)
class Continued:
    """The continuations of a pool's completions.

    Attributes:
        folder: Folder of the evaluation that has them.
        sha256: Checksum of its samples.
        separators: Separators of steps.
        values: Id of a beginning -> success of each of its scored continuations.
    """

    folder: Path
    sha256: str
    separators: list[str]
    values: dict[str, list[float]]

    def labelled(self, record: Record, success: float, hard: bool) -> list[tuple[int, float]] | None:
        """(one past the last character, label) of each step of a completion; None if a step was never continued.

        Nothing follows the last step, so its label is the completion's `success`.
        """
        text = record["completion"]
        values = [self.values.get(begun_id(record["problem"], each)) for each in beginnings(text, self.separators)]
        if not all(values):
            return None
        labels = [float(max(of_step) >= 1) if hard else sum(of_step) / len(of_step) for of_step in values if of_step]
        # Terms may lie outside [0, 1], but labels are probabilities.
        bounded = [min(1.0, max(0.0, label)) for label in (*labels, success)]
        return list(zip(step_ends(text, self.separators), bounded, strict=True))


def read_continued(folder: Path, pool: SamplePool) -> Continued:
    """Reads the finished continuations in a folder.

    Raises:
        InputError: The folder has none, or they are of another pool.
    """
    continuations = open_pool(folder)
    continues: dict[str, Any] = continuations.settings.get(CONTINUES, {})
    if continues.get("pool") != pool.sha256:
        what = "continuations of another pool" if continues else "no continuations"
        fix = f"make them with tools/evaluate.py ... --continue {pool.folder} --out FOLDER"
        raise InputError(str(folder), f"holds {what}", fix)
    # Continuations that could not be scored have no success and are left out of the share.
    success = continuations.settings["reward"]["success"]
    values: dict[str, list[float]] = {}
    for _, record in records_of(continuations):
        if success in record["terms"]:
            values.setdefault(record["problem"], []).append(record["terms"][success])
    return Continued(folder, continuations.sha256, continues["separators"], values)
