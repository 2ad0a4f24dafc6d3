"""Rows of stored tables: JSON Lines, JSON, CSV, Parquet and Arrow files, and folders as `datasets` saves them.

First stage of reading problems: records (rows of files), `problems` (a row as a prompt), `stored` (all problems of a
run), `prompt_order` (the stream that training draws from). No code of a data set is ever run: the files of a folder are
chosen by name.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from grpo_mega.errors import InputError, instead_of
from grpo_mega.models.families.hf_folder import on_hub

TEXTS = (".jsonl", ".json", ".csv", ".tsv")
"""Endings of text files, which may also be compressed: .jsonl.gz."""
SUFFIXES = (*TEXTS, *(f"{suffix}.gz" for suffix in TEXTS), ".parquet", ".arrow")
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
"""Names of splits in the names of files and folders."""
SPELLINGS = {"training": "train", "testing": "test"}
"""Alternative spellings of splits."""
SAVED = "state.json"
"""File that `Dataset.save_to_disk` writes beside its data files to list them."""
ABOUT = (SAVED, "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
"""Files of a data set's folder that hold no rows."""
MOST_LINE = 1 << 28
"""Largest accepted line in bytes: a few bytes of an archive may expand to gigabytes."""
ORDINARY_BYTES, MOST_COMPRESSED, MOST_ROWS, ROWS_AT_ONCE = 1 << 26, 1000, 1 << 30, 4096
"""Limits for a Parquet file: column chunks of up to `ORDINARY_BYTES` are always read, larger ones if they expand at
most `MOST_COMPRESSED` times; largest accepted number of rows; rows held in memory at once."""


@dataclass(frozen=True)
class Record:
    """A row of a table.

    Attributes:
        where: File and line or row, for messages.
        name: FILE/NUMBER, without the file's suffix; unique among the rows read.
        fields: {column: value}.
    """

    where: str
    name: str
    fields: dict[str, Any]


def records(path: str | Path, split: str = "train") -> Iterator[Record]:
    """The rows of a file, or of the files of a folder that belong to a split, one after the other.

    Raises:
        InputError: There is no such file or folder, a row or file cannot be read, no file belongs to the split, or
            files of several tables do.
    """
    path = Path(path)
    for file in files_of(path, split):
        name = (str(file.relative_to(path)) if path.is_dir() else file.name).removesuffix(_ending(file))
        for number, where, fields in _rows(file):
            yield Record(where, f"{name}/{number}", fields)


def files_of(path: Path, split: str) -> list[Path]:
    """The file itself, or the files of a folder that belong to a split, in order. Raises as `records` does."""
    if path.is_file():
        if _ending(path) not in SUFFIXES:
            raise InputError(str(path), f"unknown file type {_ending(path)!r}", f"convert it to {', '.join(SUFFIXES)}")
        return [path]
    if not path.is_dir():
        fix = f"correct the path{on_hub(path, is_data=True)}"
        raise InputError(str(path), f"no such file or folder{instead_of(path)}", fix)
    # A folder of `save_to_disk` lists its files; in any other the names decide.
    if (path / SAVED).is_file():
        return _saved(path)
    every = []
    for file in sorted(path.rglob("*")):
        relative = file.relative_to(path)
        # Files in hidden folders, such as download caches, hold no rows.
        hidden = any(part.startswith(".") for part in relative.parts) or file.name.startswith("cache-")
        if _ending(relative) in SUFFIXES and file.name not in ABOUT and not hidden and file.is_file():
            every.append(file)
    chosen = [file for file in every if _belongs(file.relative_to(path), split)]
    # A folder whose names mention no split at all is one table, whichever split is asked for.
    if not chosen and not any(_splits_in(part) for file in every for part in file.relative_to(path).parts):
        chosen = every
    if not chosen:
        readable = ", ".join(str(file.relative_to(path)) for file in every[:5]) or "none"
        raise InputError(
            str(path),
            f"no file belongs to the split {split!r}; readable files: {readable}",
            f"choose a different split, give one file's path, or put {split!r}, and no other split, into the names of "
            "its files",
        )
    # Files in several folders, or with several endings, are different tables, of which only the user can choose one.
    tables = sorted({f"{file.parent}/*{_ending(file)}" for file in chosen})
    if len(tables) > 1:
        raise InputError(
            str(path), f"the split {split!r} has several tables, {' and '.join(tables)}", "give one folder"
        )
    saved = chosen[0].parent
    return _saved(saved) if (saved / SAVED).is_file() else chosen


def _saved(folder: Path) -> list[Path]:
    """Data files listed in a folder of `save_to_disk`; other files in it are caches."""
    try:
        files = [
            folder / Path(entry["filename"]).name for entry in json.loads((folder / SAVED).read_text())["_data_files"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            str(folder / SAVED), f"does not list the files of the data set ({error!r})", "save the data set again"
        ) from error
    if absent := [file for file in files if not file.is_file()]:
        raise FileNotFoundError(f"{absent[0]}: no such file, and {folder / SAVED} names it")
    return files


def _belongs(relative: Path, split: str) -> bool:
    """Whether a file belongs to a split, by its own name or that of the nearest folder that names a split.

    A name with several splits, such as train_test.jsonl, belongs to none.
    """
    wanted = SPELLINGS.get(split.lower(), split.lower())
    itself = re.compile(rf"(?<![A-Za-z]){re.escape(split)}(?![A-Za-z]|(?<=[0-9])[0-9])", re.IGNORECASE)
    # From the file's own name outwards: `train/test.jsonl` holds test rows.
    for part in reversed(relative.parts):
        named = _splits_in(part)
        if wanted not in SPLITS and itself.search(part):
            return True
        if named:
            return named == {wanted}
    return False


def _splits_in(name: str) -> set[str]:
    """Splits that occur as words in a file's or folder's name: train in gsm8k_train-0.jsonl, Training, gsm8kTrain."""
    words = {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}
    return {SPELLINGS.get(word, word) for word in words} & {*SPLITS}


def _ending(file: Path) -> str:
    """The suffix of a file; of a compressed file, the last two: .jsonl.gz."""
    return "".join(file.suffixes[-2:]) if file.suffix == ".gz" else file.suffix


def _rows(file: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yields (number from 1, where, {column: value}) of each row."""
    kind = _ending(file).removesuffix(".gz")
    if kind == ".jsonl" or (kind == ".json" and _has_objects_on_lines(file)):
        for number, line in json_lines(file):
            yield number, f"{file}:{number}", json_object(line, f"{file}:{number}")
        return
    rows = _list(file) if kind == ".json" else _of_csv(file) if kind in TEXTS else _of_table(file)
    for number, row in enumerate(rows, start=1):
        where = f"{file}, row {number}"
        yield number, where, checked_object(row, where)


def _has_objects_on_lines(file: Path) -> bool:
    """Whether a .json file is JSON Lines: an object on the first line, and more after it."""
    with opened(file) as lines:
        try:
            return isinstance(json.loads(lines.readline().decode("utf-8-sig")), dict) and bool(lines.readline().strip())
        except (ValueError, RecursionError):
            return False


def _list(file: Path) -> list[object]:
    try:
        with opened(file) as text:
            rows = json.loads(text.read().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError(str(file), f"not JSON ({error})", "write a list of objects") from error
    if not isinstance(rows, list):
        raise InputError(str(file), f"holds a {type(rows).__name__}", "write a list of objects, or one object a line")
    return rows


def _of_csv(file: Path) -> Iterator[dict[str, str]]:
    """Yields the rows of a file with commas, or tabs, and the names of its columns on the first line."""
    # Python refuses cells of more than 131,072 characters by default. Spreadsheets begin files with a byte order mark,
    # which utf-8-sig removes from the name of the first column.
    csv.field_size_limit(sys.maxsize)
    with opened(file) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text:
        lines = csv.reader(text, delimiter="\t" if ".tsv" in file.suffixes else ",", strict=True)
        with _named(file, (csv.Error, UnicodeDecodeError)):
            header = next(lines, [])
            if twice := {name for name in header if header.count(name) > 1}:
                raise InputError(str(file), f"the first line names the column {min(twice)!r} twice", "rename one")
            for number, cells in enumerate(filter(None, lines), start=1):
                if len(cells) != len(header):
                    raise InputError(
                        f"{file}, row {number}",
                        f"{len(cells)} cells, and the first line names {len(header)} columns, {', '.join(header)}",
                        "write a text with commas or line feeds in double quotes",
                    )
                yield dict(zip(header, cells, strict=True))


def _of_table(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a Parquet or Arrow file, with only part of it in memory at a time."""
    try:
        # An optional dependency, not needed for text files.
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(
            str(file), "reading it needs pyarrow", "pip install pyarrow, or convert the file to .jsonl"
        ) from error
    with _named(file, (pyarrow.ArrowException, OSError, ValueError)):
        if file.suffix == ".parquet":
            with pyarrow.parquet.ParquetFile(file) as table:
                _refuse_bomb(file, table.metadata)
                for batch in table.iter_batches(ROWS_AT_ONCE):
                    yield from batch.to_pylist()
            return
        with pyarrow.memory_map(str(file)) as mapped:
            for batch in _batches(pyarrow, mapped):
                yield from batch.to_pylist()


def _refuse_bomb(file: Path, metadata: Any) -> None:
    """Raises InputError for a Parquet file that would fill the memory: texts do not compress a thousand times."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    for chunk in [group.column(number) for group in groups for number in range(group.num_columns)]:
        size, held = chunk.total_uncompressed_size, chunk.total_compressed_size
        if size > max(ORDINARY_BYTES, MOST_COMPRESSED * held):
            what = f"column {chunk.path_in_schema} expands from {held:,} to {size:,} bytes"
            raise InputError(str(file), what, "write the file again")
    # Sizes alone do not bound memory: a chunk's dictionary may hold one text for billions of rows.
    if metadata.num_rows > MOST_ROWS:
        raise InputError(str(file), f"{metadata.num_rows:,} rows, more than {MOST_ROWS:,}", "write the file again")


def _batches(pyarrow: Any, mapped: Any) -> Iterator[Any]:
    """Yields the record batches of an Arrow file in either format."""
    try:
        table = pyarrow.ipc.open_file(mapped)
    # `datasets` writes the stream format under the same suffix.
    except pyarrow.ArrowInvalid:
        yield from pyarrow.ipc.open_stream(mapped)
        return
    yield from (table.get_batch(i) for i in range(table.num_record_batches))


@contextmanager
def _named(file: Path, errors_of_library: tuple[type[Exception], ...]) -> Iterator[None]:
    """Names the file in errors of a library."""
    try:
        yield
    # An InputError is a ValueError as well, but it names the file already.
    except InputError:
        raise
    except errors_of_library as error:
        raise InputError(
            str(file), f"cannot be read as {file.suffix}: {error}", "write or download the file again"
        ) from error


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, decompressed if its name ends in .gz. Raises InputError for a damaged archive."""
    if path.suffix != ".gz":
        with path.open("rb") as file:
            yield file
        return
    try:
        with gzip.open(path) as archive:
            yield io.BufferedReader(archive)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(
            str(path), f"cannot be decompressed ({error})", "download or compress the file again"
        ) from error


def json_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (number from 1, line), without byte order mark and without blank lines at the end."""
    blank = number = 0
    with opened(path) as lines:
        # Iterating over the file would read a line of any length into memory.
        while line := lines.readline(MOST_LINE):
            number += 1
            if len(line) == MOST_LINE:
                what = f"a line of more than {MOST_LINE:,} bytes"
                raise InputError(f"{path}:{number}", what, "write one object a line")
            content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not content.strip():
                blank = blank or number
            elif blank:
                raise InputError(f"{path}:{blank}", "a blank line, and others follow", "remove the line")
            else:
                yield number, content


def json_object(line: bytes, where: str) -> dict[str, Any]:
    """The JSON object on one line."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(where, f"not UTF-8 at byte {error.start} of the line", "convert the file") from error
    except (ValueError, RecursionError) as error:
        raise InputError(where, f"not JSON ({error})", "write one object a line") from error
    return checked_object(record, where)


def checked_object(record: object, where: str) -> dict[str, Any]:
    """Returns the record. Raises InputError unless it is a JSON object."""
    if not isinstance(record, dict):
        raise InputError(where, f"holds a {type(record).__name__}", "write a JSON object")
    return record
