"""Fields of a row of stored data: looked up by their path, checked, and read as text or as the messages of a chat."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from grpo_mega.data.chat import ROLES, Turn

_UNWRITABLE = re.compile("[\0\ud800-\udfff]")
"""Characters that JSON can encode but that tokenizers, files and terminals reject."""


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


def column(record: Mapping[str, Any], path: str, where: str, cure: str) -> Any:
    """The value at a dotted path of a row. Raises ValueError that lists the columns, and the cure, if there is none."""
    value = field_at(record, path)
    if value is None and path not in record:
        raise ValueError(f"{where}: field {path!r} is missing; the columns are {', '.join(record) or 'none'}: {cure}")
    return value


def checked_text(value: object, field: str, where: str) -> str:
    """Returns the text of a required field. Raises ValueError that begins with `where`."""
    if value is None:
        raise ValueError(f"{where}: field {field!r} is missing")
    if not isinstance(value, str):
        raise ValueError(f"{where}: field {field!r} is {value!r}; write it as a string")
    if not value.strip():
        raise ValueError(f"{where}: field {field!r} is empty")
    if match := _UNWRITABLE.search(value):
        what = "a NUL" if match[0] == "\0" else f"half of a surrogate pair (\\u{ord(match[0]):04x})"
        raise ValueError(f"{where}: field {field!r} holds {what} at character {match.start() + 1}; remove it")
    return value


def text_or_integer(value: object, field: str, where: str) -> str:
    """Returns the text of a required field that may also be an integer. Raises ValueError that begins with `where`."""
    return checked_text(str(value) if isinstance(value, int) and not isinstance(value, bool) else value, field, where)


def json_value(value: object, field: str, where: str) -> Any:
    """Returns a required value that JSON can express. Raises ValueError that begins with `where`."""
    if value is None:
        raise ValueError(f"{where}: field {field!r} is missing")
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: field {field!r}: {error}; JSON must be able to express it") from error
    return value


def turns_of(messages: object, field: str, where: str, checked: Callable[[str], str]) -> list[Turn]:
    """The turns of a chat.

    Args:
        messages: A list of {"role": ..., "content": ...}.
        field: Name of the field, for errors.
        where: File and line, for errors.
        checked: Raises ValueError on a text that the tokenizer does not accept.

    Raises:
        ValueError: `messages` is not such a list; names the message.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: field {field!r} must be a list of messages, with one at least")
    turns = []
    for i, message in enumerate(messages):
        here = f"{field}[{i}]"
        if not isinstance(message, dict):
            raise ValueError(f'{where}: field {here!r} is {message!r}; write {{"role": ..., "content": ...}}')
        written = {
            name for name, value in message.items() if value is not None
        }  # tables have every column in every row
        if unread := sorted(written - {"role", "content"}):
            raise ValueError(
                f"{where}: field '{here}.{unread[0]}' is not read; write it into the content, or remove it"
            )
        if message.get("role") not in ROLES:
            raise ValueError(
                f"{where}: field '{here}.role' is {message.get('role')!r}; choose one of {', '.join(ROLES)}"
            )
        content = checked_by(checked, message.get("content"), f"{here}.content", where)
        turns.append(Turn(message["role"], content))
    return turns


def checked_by(checked: Callable[[str], str], value: object, field: str, where: str) -> str:
    """Returns the text of a required field. Raises ValueError if it is missing or `checked` rejects it."""
    text = checked_text(value, field, where)
    try:
        return checked(text)
    except ValueError as error:
        raise ValueError(f"{where}: field {field!r}: {error}") from error
