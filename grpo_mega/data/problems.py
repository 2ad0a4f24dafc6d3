"""Problems from stored tables: checks each row and renders it as the policy's prompt."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from grpo_mega.config.schema import SourceConfig
from grpo_mega.data.chat import ASSISTANT, USER, Turn
from grpo_mega.data.fields import checked_text, column, field_at, json_value, text_or_integer, turns_of
from grpo_mega.data.records import Record, records
from grpo_mega.data.tokenizer import Tokenizer
from grpo_mega.types import Prompt

SHOWN = 3
"""Number of problems of one kind that a message names."""
ONLY = ""
"""Name of the source made of data.train_path and data.test_path, whose rows may have an id and a task."""
NAMED = "name that of the {what}, by --{field} COLUMN or data.sources.NAME.{field} (docs/data.md)"
"""Cure for a row without a column."""
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")

Unreachable = Callable[[str], str | None]
"""Answer -> why no completion can match it, and the fix; None when one can."""


@dataclass(frozen=True)
class Problem:
    """A stored problem.

    Attributes:
        prompt: The prompt that the policy gets.
        asked: The stored problem, without template; for a chat, the user's messages joined by line ends.
        source: Name of the problem's source.
        difficulty: The number in the source's difficulty column; 0 without one.
    """

    prompt: Prompt
    asked: str
    source: str = ONLY
    difficulty: float = 0.0


def load_problems(
    path: str | Path,
    tokenizer: Tokenizer,
    unreachable: Unreachable = lambda answer: None,
    warn: Callable[[str], None] = lambda text: None,
    name: str = ONLY,
    source: SourceConfig | None = None,
    split: str = "train",
) -> list[Problem]:
    """Reads the problems of a file, or of a split of a folder.

    Args:
        path: The file or folder; `records` lists the formats.
        tokenizer: Renders a problem as the policy's prompt.
        unreachable: Detects answers that no completion can match.
        warn: Called about problems that quote special tokens.
        name: Name of the source: the task of its problems, and the prefix of their ids.
        source: Columns to read; by default prompt and answer.
        split: The split of a folder.

    Raises:
        FileNotFoundError: There is no such file or folder.
        ValueError: A row is not a problem, or its answer is `unreachable`; names file, line or row, and field.
    """
    return problems_of(records(path, split), path, tokenizer, unreachable, warn, name, source or SourceConfig())


def problems_of(
    rows: Iterable[Record],
    path: str | Path,
    tokenizer: Tokenizer,
    unreachable: Unreachable,
    warn: Callable[[str], None],
    name: str,
    source: SourceConfig,
) -> list[Problem]:
    """Problems of rows, which messages refer to by `path`; see `load_problems`."""
    problems: dict[str, Problem] = {}
    unread: dict[str, None] = {}
    hopeless: list[str] = []
    quoting: list[str] = []
    for record in rows:
        problem = _problem(record, tokenizer, name, source)
        prompt = problem.prompt
        if prompt.id in problems:
            field = source.id or "id"
            raise ValueError(f"{record.where}: field {field!r}: {prompt.id!r} was already used; ids must be unique")
        problems[prompt.id] = problem
        unread |= dict.fromkeys(record.fields)
        if why := unreachable(prompt.answer):
            hopeless.append(f"{record.where}: field {source.answer or 'answer'!r} {why}")
        asked = asked_in(record, source)
        if quoted := tokenizer.quoted(asked if isinstance(asked, str) else "\n".join(turn.content for turn in asked)):
            quoting.append(f"{record.where} ({quoted[0]})")
    if not problems:
        raise ValueError(f"{path}: the file is empty; it needs one problem a line")
    if hopeless:
        shown = "\n".join(f"  {problem}" for problem in hopeless[:SHOWN])
        raise ValueError(
            f"{path}: no completion can be right for {len(hopeless)} of {len(problems)} problems:\n{shown}"
        )
    warn_of_quoting(quoting, len(problems), f"problems of {path}", warn)
    if dropped := [name for name in unread if name not in ("prompt", "answer", "id", "task")] if name == ONLY else []:
        warn(
            f"{path}: columns that are not read: {', '.join(dropped)}. A reward gets those that a source names: "
            f"data.sources.NAME.metadata=[{dropped[0]}], with data.sources.NAME.path in place of data.train_path"
        )
    return list(problems.values())


def warn_of_quoting(quoting: list[str], of: int, what: str, warn: Callable[[str], None]) -> None:
    """Calls `warn` with the rows or problems, if any, that quote special tokens, which are encoded as text."""
    if quoting:
        warn(
            f"{len(quoting)} of {of} {what} quote special tokens, which count as text "
            f"(data.parse_special=true makes them tokens): {', '.join(quoting[:SHOWN])}"
        )


def _problem(record: Record, tokenizer: Tokenizer, name: str, source: SourceConfig) -> Problem:
    fields, where = record.fields, record.where
    asked = asked_in(record, source)
    try:
        text, token_ids = tokenizer.prompt(asked)
    except ValueError as error:
        raise ValueError(f"{where}: field {source.prompt!r}: {error}") from error
    own = own_id(record, source, name)
    prompt = Prompt(
        id=own if name == ONLY else f"{name}/{own}",
        token_ids=tuple(token_ids),
        text=text,
        answer=answer_of(record, source),
        task=name or checked_text(fields.get("task", "jsonl"), "task", where),
        metadata={
            name: json_value(column(fields, name, where, "correct data.sources.NAME.metadata"), name, where)
            for name in source.metadata
        },
        asked=asked if isinstance(asked, str) else [asdict(turn) for turn in asked],
    )
    return Problem(prompt, plain(asked), name, _difficulty(record, source))


def own_id(record: Record, source: SourceConfig, name: str = ONLY) -> str:
    """Id of the row: from the id column, or the row's number.

    Raises:
        ValueError: The id column is empty; names file, line or row, and field.
    """
    fields, where = record.fields, record.where
    if source.id:
        return text_or_integer(field_at(fields, source.id), source.id, where)
    return checked_text(fields.get("id", record.name), "id", where) if name == ONLY else record.name


def asked_in(record: Record, source: SourceConfig) -> str | list[Turn]:
    """The problem in the row: text, or the turns of a chat that the policy is to continue.

    Raises:
        ValueError: The row has no problem; names file, line or row, and field.
    """
    field, where = source.prompt, record.where
    value = column(record.fields, field, where, NAMED.format(what="problem", field="prompt"))
    if not isinstance(value, list):
        return checked_text(value, field, where)
    turns = turns_of(value, field, where, lambda text: text)
    if turns[-1].role == ASSISTANT:
        raise ValueError(f"{where}: field {field!r} ends with the assistant's message; remove it")
    return turns


def plain(asked: str | list[Turn]) -> str:
    """The problem as one text: the user's messages joined by line ends, or all messages if none is the user's.

    System messages are left out, as they do not distinguish problems.
    """
    if isinstance(asked, str):
        return asked
    return "\n".join(turn.content for turn in [turn for turn in asked if turn.role == USER] or asked)


def answer_of(record: Record, source: SourceConfig) -> str:
    """The answer in the row: the whole column, or the pattern's last match in it; empty for a source without answers.

    Raises:
        ValueError: The row has no answer; names file, line or row, and field.
    """
    if (field := source.answer) is None:
        return ""
    found = column(record.fields, field, record.where, NAMED.format(what="answer", field="answer"))
    text = text_or_integer(found, field, record.where)
    if source.answer_pattern is None:
        return text
    matches = [*re.finditer(source.answer_pattern, text)]
    if not matches:
        raise ValueError(
            f"{record.where}: field {field!r} has nothing that matches answer_pattern={source.answer_pattern!r}: "
            f"{text[-40:]!r} is its end"
        )
    answer = matches[-1][1] if matches[-1].re.groups else matches[-1][0]
    return checked_text((answer or "").strip(), field, record.where)


def _difficulty(record: Record, source: SourceConfig) -> float:
    if source.difficulty is None:
        return 0.0
    value = column(record.fields, source.difficulty, record.where, "correct data.sources.NAME.difficulty")
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):  # as CSV has them
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{record.where}: field {source.difficulty!r} is {value!r}; a number is needed")
    return float(value)
