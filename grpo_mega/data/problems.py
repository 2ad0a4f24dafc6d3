"""Problems: the fields of a stored row, checked, and rendered as the policy's prompt."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_mega.config.schema import SourceConfig
from grpo_mega.data.chat import ASSISTANT, ROLES, USER, Turn
from grpo_mega.data.records import Record, records
from grpo_mega.data.tokenizer import Tokenizer
from grpo_mega.errors import InputError
from grpo_mega.types import Prompt

SHOWN = 3
"""Number of problems of one kind that a message names."""
ONLY = ""
"""Name of the source made of data.train_path and data.test_path, whose rows may have an id and a task."""
COLUMN_FIX = "give the column of the {what}, by --{field} COLUMN or data.sources.NAME.{field} (docs/data.md)"
"""Fix for a row without a column."""
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_UNWRITABLE = re.compile("[\0\ud800-\udfff]")
"""Characters that JSON can encode but that tokenizers, files and terminals reject."""

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
        InputError: The file or folder is missing, a row is not a problem, or its answer is `unreachable`; names the
            file, the line or row, and the field.
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
    columns: dict[str, None] = {}
    hopeless: list[str] = []
    quoting: list[str] = []
    for record in rows:
        asked = asked_in(record, source)
        problem = _problem(record, asked, tokenizer, name, source)
        prompt = problem.prompt
        if prompt.id in problems:
            field = source.id or "id"
            raise InputError(f"{record.where}: field {field!r}", f"{prompt.id!r} was already used", "make ids unique")
        problems[prompt.id] = problem
        columns |= dict.fromkeys(record.fields)
        # Collected, so that one message says how many answers are hopeless: a wrong column makes all of them so.
        if why := unreachable(prompt.answer):
            hopeless.append(f"{record.where}: field {source.answer or 'answer'!r} {why}")
        if quoted := tokenizer.quoted(asked if isinstance(asked, str) else "\n".join(turn.content for turn in asked)):
            quoting.append(f"{record.where} ({quoted[0]})")
    if not problems:
        raise InputError(str(path), "the file is empty", "write one problem a line")
    if hopeless:
        shown = "".join(f"\n  {problem}" for problem in hopeless[:SHOWN])
        what = f"no completion can be right for {len(hopeless)} of {len(problems)} problems"
        raise InputError(str(path), what, f"correct or remove them:{shown}")
    warn_of_quoting(quoting, len(problems), f"problems of {path}", warn)
    # A named source says which columns it reads; without one, a column could be ignored unnoticed.
    if dropped := [name for name in columns if name not in ("prompt", "answer", "id", "task")] if name == ONLY else []:
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


def _problem(record: Record, asked: str | list[Turn], tokenizer: Tokenizer, name: str, source: SourceConfig) -> Problem:
    fields, where = record.fields, record.where
    try:
        text, token_ids = tokenizer.prompt(asked)
    except InputError as error:
        raise InputError(f"{where}: field {source.prompt!r}: {error.where}", error.what, error.fix) from error
    row_id = id_of(record, source, name)
    # Ids are unique within a source only; its name in front makes them unique within the run.
    prompt = Prompt(
        id=row_id if name == ONLY else f"{name}/{row_id}",
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


def id_of(record: Record, source: SourceConfig, name: str = ONLY) -> str:
    """Id of the row: from the id column, or the row's number. Raises InputError when the id column is empty."""
    fields, where = record.fields, record.where
    if source.id:
        return text_or_integer(field_at(fields, source.id), source.id, where)
    return checked_text(fields.get("id", record.name), "id", where) if name == ONLY else record.name


def asked_in(record: Record, source: SourceConfig) -> str | list[Turn]:
    """The problem in the row: text, or the turns of a chat that the policy is to continue.

    Raises:
        InputError: The row has no problem; names file, line or row, and field.
    """
    field, where = source.prompt, record.where
    value = column(record.fields, field, where, COLUMN_FIX.format(what="problem", field="prompt"))
    if not isinstance(value, list):
        return checked_text(value, field, where)
    turns = turns_of(value, field, where, lambda text: text)
    if turns[-1].role == ASSISTANT:
        raise InputError(f"{where}: field {field!r}", "ends with the assistant's message", "remove that message")
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
        InputError: The row has no answer; names file, line or row, and field.
    """
    if (field := source.answer) is None:
        return ""
    value = column(record.fields, field, record.where, COLUMN_FIX.format(what="answer", field="answer"))
    text = text_or_integer(value, field, record.where)
    if source.answer_pattern is None:
        return text
    matches = [*re.finditer(source.answer_pattern, text)]
    if not matches:
        raise InputError(
            f"{record.where}: field {field!r}",
            f"ends with {text[-40:]!r}, and nothing in it matches answer_pattern={source.answer_pattern!r}",
            "correct the pattern or the answer",
        )
    answer = matches[-1][1] if matches[-1].re.groups else matches[-1][0]
    return checked_text((answer or "").strip(), field, record.where)


def _difficulty(record: Record, source: SourceConfig) -> float:
    if source.difficulty is None:
        return 0.0
    value = column(record.fields, source.difficulty, record.where, "correct data.sources.NAME.difficulty")
    # CSV files have numbers as text.
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InputError(f"{record.where}: field {source.difficulty!r}", f"{value!r} is not a number", "write a number")
    return float(value)


def field_at(record: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, such as `reward_model.ground_truth` or `messages.0.content`; None without one.

    A column whose name contains the dots takes precedence.
    """
    if path in record:
        return record[path]
    value: Any = record
    for part in path.split("."):
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


def column(record: Mapping[str, Any], path: str, where: str, fix: str) -> Any:
    """The value at a dotted path of a row. Raises InputError, which lists the columns, if there is none."""
    value = field_at(record, path)
    if value is None and path not in record:
        raise InputError(f"{where}: field {path!r}", f"missing; the columns are {', '.join(record) or 'none'}", fix)
    return value


def checked_text(value: object, field: str, where: str) -> str:
    """Returns the text of a required field. Raises InputError, whose where begins with the argument `where`."""
    here = f"{where}: field {field!r}"
    if value is None:
        raise InputError(here, "missing", "add it, or remove the row")
    if not isinstance(value, str):
        raise InputError(here, f"{value!r} is not a string", "write it as a string")
    if not value.strip():
        raise InputError(here, "empty", "write a text, or remove the row")
    if match := _UNWRITABLE.search(value):
        what = "a NUL" if match[0] == "\0" else f"half of a surrogate pair (\\u{ord(match[0]):04x})"
        raise InputError(here, f"holds {what} at character {match.start() + 1}", "remove it")
    return value


def text_or_integer(value: object, field: str, where: str) -> str:
    """Returns the text of a required field that may also be an integer. Raises InputError as `checked_text` does."""
    return checked_text(str(value) if isinstance(value, int) and not isinstance(value, bool) else value, field, where)


def json_value(value: object, field: str, where: str) -> Any:
    """Returns a required value that JSON can express. Raises InputError as `checked_text` does."""
    if value is None:
        raise InputError(f"{where}: field {field!r}", "missing", "add it, or remove the row")
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: field {field!r}", str(error), "write a value that JSON can express") from error
    return value


def turns_of(messages: object, field: str, where: str, checked: Callable[[str], str]) -> list[Turn]:
    """The turns of a chat.

    Args:
        messages: A list of {"role": ..., "content": ...}.
        field: Name of the field, for errors.
        where: File and line, for errors.
        checked: Raises InputError on a text that the tokenizer does not accept.

    Raises:
        InputError: `messages` is not such a list; names the message.
    """
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{where}: field {field!r}", "not a list of messages", "write one with at least one message")
    turns = []
    for i, message in enumerate(messages):
        here = f"{field}[{i}]"
        if not isinstance(message, dict):
            fix = 'write {"role": ..., "content": ...}'
            raise InputError(f"{where}: field {here!r}", f"{message!r} is not a message", fix)
        # Tables have every column in every row, and fill what a message lacks with None.
        written = {name for name, value in message.items() if value is not None}
        if unread := sorted(written - {"role", "content"}):
            fix = "write it into the content, or remove it"
            raise InputError(f"{where}: field '{here}.{unread[0]}'", "is not read", fix)
        if message.get("role") not in ROLES:
            what = f"{message.get('role')!r} is not a role"
            raise InputError(f"{where}: field '{here}.role'", what, f"choose one of {', '.join(ROLES)}")
        content = checked_by(checked, message.get("content"), f"{here}.content", where)
        turns.append(Turn(message["role"], content))
    return turns


def checked_by(checked: Callable[[str], str], value: object, field: str, where: str) -> str:
    """Returns the text of a required field. Raises InputError if it is missing or `checked` rejects it."""
    text = checked_text(value, field, where)
    try:
        return checked(text)
    except InputError as error:
        raise InputError(f"{where}: field {field!r}: {error.where}", error.what, error.fix) from error
