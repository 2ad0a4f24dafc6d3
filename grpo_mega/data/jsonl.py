"""Reads JSON Lines files, compressed or not: lines and the objects on them."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

MOST_LINE = 1 << 28
"""Bytes of a line that is believed: a few of an archive may be gigabytes of it."""


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, decompressed if its name ends in .gz. Raises ValueError for a damaged archive."""
    if path.suffix != ".gz":
        with path.open("rb") as file:
            yield file
        return
    try:
        with gzip.open(path) as archive:
            yield io.BufferedReader(archive)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be decompressed ({error}); download or compress it again") from error


def json_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (number from 1, line), without byte order mark and without blank lines at the end."""
    blank = number = 0
    with opened(path) as lines:
        while line := lines.readline(MOST_LINE):
            number += 1
            if len(line) == MOST_LINE:
                raise ValueError(f"{path}:{number}: a line of more than {MOST_LINE:,} bytes; is it one object a line?")
            content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not content.strip():
                blank = blank or number
            elif blank:
                raise ValueError(f"{path}:{blank}: the line is blank, and others follow; remove it")
            else:
                yield number, content


def json_object(line: bytes, where: str) -> dict[str, Any]:
    """The JSON object on one line."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 at byte {error.start} of the line; convert the file") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error}); every line must hold one object") from error
    return checked_object(record, where)


def checked_object(record: object, where: str) -> dict[str, Any]:
    """Returns the record if it is a JSON object. Raises ValueError that begins with `where`."""
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a JSON object is needed, not {type(record).__name__}")
    return record
