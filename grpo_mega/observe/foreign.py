"""Reads files and shows texts that are not trusted: sizes of files are bounded, and texts cannot control a terminal."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any, TextIO

from grpo_mega.config.recorded import plain

MOST = 1e300
"""Largest number in use: a sum of a few larger ones is infinite."""
MOST_BYTES = 1 << 24
"""Largest size of a file that is read whole; a run writes far smaller ones."""
MOST_YAML_BYTES = 1 << 20
"""Largest size of a YAML file: a megabyte takes seconds."""


def printable(text: str, keep: str = "\n\t", ascii_only: bool = False) -> str:
    """The text with control characters, direction marks and lone surrogates escaped, such as \\x1b.

    A terminal, a log viewer or `print` then shows it as text. The characters `keep` stay.
    """
    return "".join(
        char
        if char in keep or (char.isprintable() and (char.isascii() or not ascii_only))
        else char.encode("unicode_escape").decode()
        for char in text
    )


def tell(text: object, stream: TextIO | None = None) -> None:
    """Prints a text that may quote a run directory, escaped by `printable`, to stdout or `stream`."""
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
    # Opening a pipe would wait for its writer.
    if not file.is_file():
        raise ValueError("is not a file")
    with file.open("rb") as opened:
        content = opened.read(most + 1)
    if len(content) > most:
        raise ValueError(f"has more than {most:,} bytes")
    return content


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON or YAML file.

    Raises:
        ValueError: It is not such a file, or too large; says why, without the file's name.
        OSError: It cannot be read.
    """
    of_json = file.suffix == ".json"
    text = contents(file, MOST_BYTES if of_json else MOST_YAML_BYTES).decode(errors="replace")
    try:
        content = json.loads(text) if of_json else plain(text)
        _refuse_others({} if of_json else content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cannot be read: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(content, dict):
        raise ValueError("holds no object")
    return content


def _refuse_others(value: Any) -> None:
    """Raises ValueError for values that no run writes into YAML, such as bytes or integers too long to print."""
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
