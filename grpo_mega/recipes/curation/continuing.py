"""Continuations of answers after each step, from which labels of steps follow (Math-Shepherd).

Wang et al., 2023 (arXiv 2312.08935, section 3.2): a step is as good as the answers it leads to. A model continues each
answer of a pool several times after each of its steps, and the continuations are scored as whole answers. The step's
label is the share of correct ones (soft estimation, equation 4), or whether any is correct (hard estimation, equation
3).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_mega.data.chat import Turn
from grpo_mega.data.tokenizer import Tokenizer
from grpo_mega.evaluate.results import CONTINUES, Record
from grpo_mega.recipes.curation.selection import SamplePool, is_text, open_pool, records_of
from grpo_mega.step_ends import beginnings, step_ends
from grpo_mega.types import Prompt, Sample, Score


@dataclass(frozen=True)
class Begun:
    """The beginning of an answer, to be continued.

    Attributes:
        prompt: Problem of the answer.
        text: The answer so far.
        asked: Prompt for the model: the problem with the answer so far, under its own id.
    """

    prompt: Prompt
    text: str
    asked: Prompt


def begun_of(
    pool: SamplePool, prompts: Sequence[Prompt], separators: Sequence[str], tokenizer: Tokenizer, context: int
) -> dict[str, Begun]:
    """Beginnings to continue, by id: those of every answer of a pool that ended by itself and has a score.

    Equal beginnings are continued once. A beginning that leaves no room in `context` tokens, and an answer with
    characters that are not allowed in text, are left out; an answer with such a beginning gets no labels.

    Raises:
        ValueError: The pool has problems that are not among `prompts`, or there is nothing to continue.
    """
    known = {prompt.id: prompt for prompt in prompts}
    found: dict[str, Begun] = {}
    for _, record in records_of(pool):
        if record["problem"] not in known:
            raise ValueError(
                f"problem {record['problem']!r} of {pool.folder} is not among those that are asked here; give the "
                "--train or --data of the pool's own command"
            )
        if record["finish_reason"] != "stop" or record.get("unscorable") or not is_text(record["completion"]):
            continue
        for text in beginnings(record["completion"], separators):
            begun = _begun(known[record["problem"]], text, tokenizer)
            if len(begun.asked.token_ids) < context:
                found.setdefault(begun.asked.id, begun)
    if not found:
        raise ValueError(
            f"--separators {' '.join(map(repr, separators))} divide no answer of {pool.folder} that ended by itself "
            "and has a score; name what its steps have between them"
        )
    return found


def _begun(prompt: Prompt, text: str, tokenizer: Tokenizer) -> Begun:
    asked = prompt.asked if isinstance(prompt.asked, str) else [Turn(**turn) for turn in prompt.asked]
    tokens = (*prompt.token_ids, *tokenizer.answered(asked, text)[1])
    name = begun_id(prompt.id, text)
    return Begun(prompt, text, replace(prompt, id=name, token_ids=tokens, text=prompt.text + text))


def begun_id(problem: str, text: str) -> str:
    """Id of a beginning of an answer to a problem."""
    return f"{problem} / {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def scored_whole(
    score: Callable[[Sequence[Sample]], Sequence[Score]], begun: Mapping[str, Begun]
) -> Callable[[Sequence[Sample]], Sequence[Score]]:
    """Scores continuations as whole answers, by text; token counts are those of the continuation only."""

    def scores(samples: Sequence[Sample]) -> Sequence[Score]:
        of = [begun[sample.prompt.id] for sample in samples]
        return score([replace(s, prompt=b.prompt, text=b.text + s.text) for s, b in zip(samples, of, strict=True)])

    return scores


@dataclass(frozen=True)
class Continued:
    """The continuations of a pool's answers.

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
        """(one past the last character, label) of each step of an answer; None if a step was never continued.

        Nothing follows the last step, so its label is the answer's `success`.
        """
        text = record["completion"]
        values = [self.values.get(begun_id(record["problem"], each)) for each in beginnings(text, self.separators)]
        if not all(values):
            return None
        labels = [float(max(own) >= 1) if hard else sum(own) / len(own) for own in values if own]
        bounded = [min(1.0, max(0.0, label)) for label in (*labels, success)]
        return list(zip(step_ends(text, self.separators), bounded, strict=True))


def read_continued(folder: Path, pool: SamplePool) -> Continued:
    """Reads the finished continuations in a folder.

    Raises:
        ValueError: The folder has none, or they are of another pool.
    """
    found = open_pool(folder)
    continues: dict[str, Any] = found.settings.get(CONTINUES, {})
    if continues.get("pool") != pool.sha256:
        what = "continuations of another pool" if continues else "no continuations"
        raise ValueError(
            f"{folder} holds {what}: make them with tools/evaluate.py ... --continue {pool.folder} --out FOLDER"
        )
    success = found.settings["reward"]["success"]
    values: dict[str, list[float]] = {}
    for _, record in records_of(found):
        if success in record["terms"]:
            values.setdefault(record["problem"], []).append(record["terms"][success])
    return Continued(folder, found.sha256, continues["separators"], values)
