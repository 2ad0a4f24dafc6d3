"""Problems from a JSON Lines file, checked line by line."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from grpo_mega.data.tokenizer import Tokenizer
from grpo_mega.types import Prompt

SHOWN = 3
"""So many problems of a kind are named."""
_UNWRITABLE = re.compile("[\0\ud800-\udfff]")
"""What JSON may spell, and tokenizers, files and terminals do not take."""

Unreachable = Callable[[str], str | None]
"""Why no completion can be right when this is the answer, and the way out; None when one can."""


def load_jsonl(
    path: str | Path,
    tokenizer: Tokenizer,
    unreachable: Unreachable = lambda answer: None,
    warn: Callable[[str], None] = lambda text: None,
) -> list[Prompt]:
    """Reads one {"prompt": str, "answer": str or int} a line; "id" and "task" are optional, other fields are ignored.

    The tokenizer says how the policy is asked. A problem without an id is called FILE/LINE. `warn` is told about
    problems that quote special tokens.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A line is no problem, or its answer is `unreachable`; names file, line and field.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; check data.train_path and data.test_path")
    prompts: dict[str, Prompt] = {}
    hopeless: list[str] = []
    quoting: list[str] = []
    for number, line in json_lines(path):
        where = f"{path}:{number}"
        record = json_object(line, where)
        prompt = _parse(record, where, f"{path.stem}/{number}", tokenizer)
        if prompt.id in prompts:
            raise ValueError(f"{where}: field 'id': {prompt.id!r} was already used; ids must be unique")
        prompts[prompt.id] = prompt
        if why := unreachable(prompt.answer):
            hopeless.append(f"{where}: field 'answer' {why}")
        if quoted := tokenizer.quoted(record["prompt"]):
            quoting.append(f"{where} ({quoted[0]})")
    if not prompts:
        raise ValueError(f"{path}: the file is empty; it needs one problem a line")
    if hopeless:
        shown = "\n".join(f"  {complaint}" for complaint in hopeless[:SHOWN])
        raise ValueError(f"{path}: no completion can be right for {len(hopeless)} of {len(prompts)} problems:\n{shown}")
    warn_of_quoting(quoting, len(prompts), f"problems of {path}", warn)
    return list(prompts.values())


def warn_of_quoting(quoting: list[str], of: int, what: str, warn: Callable[[str], None]) -> None:
    """Tells `warn` where special tokens are spelt that count as text, if anywhere."""
    if quoting:
        warn(
            f"{len(quoting)} of {of} {what} quote special tokens, which count as text "
            f"(data.parse_special=true makes them tokens): {', '.join(quoting[:SHOWN])}"
        )


def json_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, counted from 1, without a byte order mark and without blank lines at its end."""
    blank = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not content.strip():
                blank = blank or number
            elif blank:
                raise ValueError(f"{path}:{blank}: the line is blank, and others follow; remove it")
            else:
                yield number, content


def _parse(record: dict[str, Any], where: str, default_id: str, tokenizer: Tokenizer) -> Prompt:
    """One line of the file as a prompt."""
    problem = _text(record, "prompt", where)
    try:
        text, token_ids = tokenizer.prompt(problem)
    except ValueError as error:
        raise ValueError(f"{where}: field 'prompt': {error}") from error
    return Prompt(
        id=_text(record, "id", where, default_id),
        token_ids=tuple(token_ids),
        text=text,
        answer=_text(record, "answer", where),
        task=_text(record, "task", where, "jsonl"),
    )


def json_object(line: bytes, where: str) -> dict[str, Any]:
    """The JSON object on one line."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 at byte {error.start} of the line; convert the file") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error}); every line must hold one object") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a JSON object is needed, not {type(record).__name__}")
    return record


def _text(record: dict[str, Any], field: str, where: str, default: str | None = None) -> str:
    """A field that must be there (or have a default) and hold text; "answer" may be an integer too."""
    value = record.get(field, default)
    if field == "answer" and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    return checked_text(value, field, where)


def checked_text(value: object, field: str, where: str) -> str:
    """The value of a field that must be there and hold text. Raises ValueError that begins with `where`."""
    if value is None:
        raise ValueError(f"{where}: field {field!r} is missing")
    if not isinstance(value, str):
        raise ValueError(f"{where}: field {field!r} is {value!r}; write it as a string")
    if not value.strip():
        raise ValueError(f"{where}: field {field!r} is empty")
    if found := _UNWRITABLE.search(value):
        what = "a NUL" if found[0] == "\0" else f"half of a surrogate pair (\\u{ord(found[0]):04x})"
        raise ValueError(f"{where}: field {field!r} holds {what} at character {found.start() + 1}; remove it")
    return value
