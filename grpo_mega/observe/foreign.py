"""Reads and shows what others may have written: files of a run directory are bounded, and texts control no terminal."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any, TextIO

from grpo_mega.config.recorded import plain

MOST = 1e300
"""Largest size of a number that is used: a sum of a few larger ones is infinite."""
MOST_BYTES = 1 << 24
"""Largest size of a file that is read as a whole; what a run writes is far smaller."""
MOST_YAML_BYTES = 1 << 20
"""The same for YAML, of which a megabyte takes seconds."""


def printable(text: str, keep: str = "\n\t", ascii_only: bool = False) -> str:
    """The text with control characters, marks that turn its direction and lone surrogates as escapes, such as \\x1b.

    A terminal, a log viewer or `print` then takes it as text. The characters `keep` stay.
    """
    return "".join(
        char
        if char in keep or (char.isprintable() and (char.isascii() or not ascii_only))
        else char.encode("unicode_escape").decode()
        for char in text
    )


def tell(text: object, stream: TextIO | None = None) -> None:
    """Prints a text that may have words of a run directory, escaped as `printable` does, to stdout or `stream`."""
    stream = stream or sys.stdout
    print(printable(str(text), ascii_only="utf" not in (stream.encoding or "utf").lower()), file=stream, flush=True)


def finite(value: object) -> float | None:
    """The value as a number of at most `MOST`; None for anything else, true and false included."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and abs(number) <= MOST else None


def contents(file: Path, most: int = MOST_BYTES) -> bytes:
    """The bytes of a file.

    Raises:
        ValueError: It is a folder, a pipe or a link to nothing, or has more than `most` bytes.
        OSError: It cannot be read.
    """
    if not file.is_file():  # opening a pipe waits for its writer
        raise ValueError("is no file")
    with file.open("rb") as opened:
        found = opened.read(most + 1)
    if len(found) > most:
        raise ValueError(f"has more than {most:,} bytes")
    return found


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON or YAML file, which must be there.

    Raises:
        ValueError: It is no such file, or too large; says why, without the file's name.
        OSError: It cannot be read.
    """
    of_json = file.suffix == ".json"
    text = contents(file, MOST_BYTES if of_json else MOST_YAML_BYTES).decode(errors="replace")
    try:
        found = json.loads(text) if of_json else plain(text)
        _refuse_others({} if of_json else found)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cannot be read: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(found, dict):
        raise ValueError("holds no object")
    return found


def _refuse_others(value: Any) -> None:
    """Raises ValueError for what no run writes into YAML, such as bytes, and numbers that Python does not print."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _refuse_others(name)
            _refuse_others(inner)
    elif isinstance(value, list):
        for inner in value:
            _refuse_others(inner)
    elif isinstance(value, int) and value.bit_length() > 64:
        raise ValueError("it has a whole number of more than 64 bits")
    elif value is not None and not isinstance(value, (str, int, float)):
        raise ValueError(f"it has a value of YAML's type {type(value).__name__}, which no run writes")
