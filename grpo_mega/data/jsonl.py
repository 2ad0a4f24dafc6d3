"""Problems from a JSON Lines file, checked line by line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grpo_mega.data.tokenizer import Tokenizer
from grpo_mega.types import Prompt


def load_jsonl(path: str | Path, tokenizer: Tokenizer) -> list[Prompt]:
    """Reads one {"prompt": str, "answer": str or int} a line; "id" and "task" are optional, other fields are ignored.

    The tokenizer says how the policy is asked. A problem without an id is called FILE/LINE.
    Raises ValueError that names file, line and field, and FileNotFoundError when there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; check data.train_path and data.test_path")
    prompts: dict[str, Prompt] = {}
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}:{number}"
            prompt = _parse(line, where, f"{path.stem}/{number}", tokenizer)
            if prompt.id in prompts:
                raise ValueError(f"{where}: field 'id': {prompt.id!r} was already used; ids must be unique")
            prompts[prompt.id] = prompt
    if not prompts:
        raise ValueError(f"{path}: the file is empty; it needs one problem a line")
    return list(prompts.values())


def _parse(line: bytes, where: str, default_id: str, tokenizer: Tokenizer) -> Prompt:
    """One line of the file as a prompt."""
    record = _record(line, where)
    text = tokenizer.prompt(_text(record, "prompt", where))
    try:
        token_ids = tuple(tokenizer.encode(text))
    except ValueError as error:
        raise ValueError(f"{where}: field 'prompt': {error}") from error
    return Prompt(
        id=_text(record, "id", where, default_id),
        token_ids=token_ids,
        text=text,
        answer=_text(record, "answer", where),
        task=_text(record, "task", where, "jsonl"),
    )


def _record(line: bytes, where: str) -> dict[str, Any]:
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
    if value is None:
        raise ValueError(f"{where}: field {field!r} is missing")
    if not isinstance(value, str):
        raise ValueError(f"{where}: field {field!r} is {value!r}; write it as a string")
    if not value.strip():
        raise ValueError(f"{where}: field {field!r} is empty")
    return value
