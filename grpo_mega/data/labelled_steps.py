"""Completions with labelled steps, for training a process reward model, from JSON Lines files.

A label says how correct a step is, from 0 to 1: by human judgement (Lightman et al., 2023, Let's Verify Step by Step,
arXiv 2305.20050), by a verifier, or by how often completions that continue from it are correct (Math-Shepherd: Wang et
al., 2023, arXiv 2312.08935, equations 3 and 4: hard and soft estimation).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from grpo_mega.config.schema import PairsConfig
from grpo_mega.data.examples import Examples, answered, examples_of_files, load_examples
from grpo_mega.data.problems import checked_by
from grpo_mega.data.supervised import asked_in, digest, quoted_in
from grpo_mega.data.tokenizer import Tokenizer
from grpo_mega.errors import InputError
from grpo_mega.step_ends import step_ends, step_tokens
from grpo_mega.types import Row

SHOWN_CHARACTERS = 40
"""Characters of a step that messages show."""


@dataclass(frozen=True)
class LabelledCompletion:
    """A completion with labelled steps, after its prompt and with its end token.

    Attributes:
        row: Tokens; the last one of each step is marked as learned.
        labels: Correctness of each step, from 0 to 1; the lowest of steps that end within one token.
        prompt: Number of tokens of the prompt.
        where: File and line.
    """

    row: Row
    labels: tuple[float, ...]
    prompt: int
    where: str

    @property
    def rows(self) -> tuple[Row]:
        """The completion as its only row."""
        return (self.row,)

    @property
    def content(self) -> bytes:
        """Token ids of the completion, without its labels."""
        return array("i", self.row.token_ids).tobytes()


def labelled_completions_of_files(
    pairs: PairsConfig,
    context: int,
    seed: int,
    tokenizer: Tokenizer,
    stop_ids: tuple[int, ...],
    warn: Callable[[str], None],
) -> Examples[LabelledCompletion]:
    """Labelled completions of a run; see `examples_of_files`, whose errors it raises."""

    def load(path: Path) -> list[LabelledCompletion]:
        return load_labelled_completions(path, tokenizer, stop_ids, pairs.max_tokens or context, pairs, warn)

    return examples_of_files(pairs, seed, tokenizer, "completion", load, _digest)


def load_labelled_completions(
    path: Path,
    tokenizer: Tokenizer,
    stop_ids: tuple[int, ...],
    longest: int,
    pairs: PairsConfig,
    warn: Callable[[str], None] = lambda text: None,
) -> list[LabelledCompletion]:
    """Reads one {"prompt": text or messages, "completion": text, "steps": [text], "labels": [number]} a line.

    Other fields are ignored. Every step must end where `pairs.separators` end one, as reinforcement learning has only
    these. A completion without an end token gets one. See `load_examples`, whose errors it raises.
    """
    parse = partial(_labelled, tokenizer, stop_ids, tuple(pairs.separators))
    return load_examples(path, "completion", parse, longest, pairs, warn)


def _labelled(
    tokenizer: Tokenizer, stop_ids: tuple[int, ...], separators: Sequence[str], record: dict[str, Any], where: str
) -> tuple[LabelledCompletion, list[str]]:
    """Labelled completion of one line, and the special tokens quoted in its prompt."""
    asked = asked_in(record, where, tokenizer)
    completion = checked_by(tokenizer.checked, record.get("completion"), "completion", where)
    steps = _steps(record, completion, where)
    labels = _labels(record, len(steps), where)
    _check_ends(steps, step_ends(completion, separators), completion, separators, where)
    prompt, ids = answered(asked, completion, "completion", where, tokenizer, stop_ids)
    written = ids[prompt:]
    # As in `Sample.text`, the text is without the token that ends it.
    spelled = written[:-1] if written[-1] in stop_ids else written
    try:
        tokens = step_tokens(tokenizer.decode(spelled), written, tokenizer.decode, separators)
    except InputError as error:
        raise InputError(f"{where}: field 'completion': {error.where}", error.what, error.fix) from error
    if len(tokens) != len(labels):
        raise InputError(
            f"{where}: field 'completion'",
            f"the tokenizer makes {len(tokens)} steps of its {len(labels)}: it spells the text differently",
            "write it as data.tokenizer does, or choose other pairs.separators",
        )
    # Several short steps may end within one token, which can have only one label: a wrong step makes it wrong.
    least: dict[int, float] = {}
    for token, label in zip(tokens, labels, strict=True):
        least[prompt + token] = min(label, least.get(prompt + token, 1.0))
    row = Row(array("i", ids), tuple((token, token + 1) for token in least))
    return LabelledCompletion(row, tuple(least.values()), prompt, where), quoted_in(asked, tokenizer)


def _steps(record: dict[str, Any], completion: str, where: str) -> list[int]:
    """One past the last character of each step in the completion; text may lie between steps.

    Raises InputError that begins with `where` when the steps do not occur in it, one after the other.
    """
    steps = record.get("steps")
    if not isinstance(steps, list) or not steps:
        what = f"{steps!r} is not a list of steps"
        raise InputError(f"{where}: field 'steps'", what, "write the text of each step in a list of strings")
    ends, end = [], 0
    for number, step in enumerate(steps, 1):
        if not isinstance(step, str) or not step.strip():
            raise InputError(f"{where}: field 'steps', step {number}", f"{step!r} is not a text", "write its text")
        # From the end of the previous step on, as two steps may have the same text.
        begin = completion.find(step, end)
        if begin < 0:
            after = f" after step {number - 1}" if end else ""
            raise InputError(
                f"{where}: field 'steps', step {number}",
                f"{_short(step)} is not in the completion{after}",
                "write each step as in the completion, in order",
            )
        end = begin + len(step)
        ends.append(end)
    return ends


def _labels(record: dict[str, Any], steps: int, where: str) -> list[float]:
    """The labels. Raises InputError that begins with `where` unless they are one number in [0, 1] for each step."""
    labels = record.get("labels")
    if not isinstance(labels, list):
        fix = "write a list with a number from 0 to 1 for each step"
        raise InputError(f"{where}: field 'labels'", f"{labels!r} is not a list", fix)
    if len(labels) != steps:
        what = f"{len(labels)} numbers for {steps} steps"
        raise InputError(f"{where}: field 'labels'", what, "write one for each")
    for number, label in enumerate(labels, 1):
        if isinstance(label, bool) or not isinstance(label, int | float) or not 0 <= label <= 1:
            fix = "write a number from 0 (wrong) to 1 (right)"
            raise InputError(f"{where}: field 'labels', label {number}", f"{label!r} is not in [0, 1]", fix)
    return [float(label) for label in labels]


def _check_ends(given: list[int], ruled: list[int], completion: str, separators: Sequence[str], where: str) -> None:
    """Raises InputError that begins with `where` when the given steps differ from those that the separators define."""
    # The last end may differ, as text may follow the last step.
    if given[:-1] == ruled[:-1]:
        return
    divided = [_short(completion[start:end]) for start, end in zip([0, *ruled], ruled, strict=False)]
    raise InputError(
        f"{where}: field 'steps'",
        f"{len(given)} steps, which end at the characters {given}, and pairs.separators={[*separators]} end "
        f"{len(ruled)} at {ruled} ({', '.join(divided)}); in reinforcement learning the separators alone divide "
        "completions",
        "choose those of this file, or write the steps as they divide them",
    )


def _short(text: str) -> str:
    """Beginning of a step, for messages."""
    return repr(text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "...")


def _digest(completions: Sequence[LabelledCompletion]) -> str:
    """Checksum of the completions, their steps and their labels."""
    labels = hashlib.sha256(repr([completion.labels for completion in completions]).encode()).hexdigest()[:16]
    return f"{digest([completion.row for completion in completions])}/{labels}"
