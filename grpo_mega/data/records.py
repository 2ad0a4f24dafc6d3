"""Rows of stored tables: JSON Lines, JSON, CSV, Parquet and Arrow files, and folders as `datasets` saves them.

No code of a data set is ever run: the files of a folder are chosen by name.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mega.data.jsonl import checked_object, json_lines, json_object, opened
from grpo_mega.models.families.reading import on_hub

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
ORDINARY_BYTES, MOST_COMPRESSED, MOST_ROWS, ROWS_AT_ONCE = 1 << 26, 1000, 1 << 30, 4096
"""Of a Parquet file: bytes of a column's chunk that are read in any case, how many times larger than stored it may be
beyond them, the number of rows that is believed, and those that are in memory at once."""


@dataclass(frozen=True)
class Record:
    """A row of a table.

    Attributes:
        where: File and line or row, for messages.
        name: FILE/NUMBER, without the file's suffix; unique within what is read.
        fields: {column: value}.
    """

    where: str
    name: str
    fields: dict[str, Any]


def records(path: str | Path, split: str = "train") -> Iterator[Record]:
    """The rows of a file, or of the files of a folder that belong to a split, one after the other.

    Raises:
        FileNotFoundError: There is no such file or folder.
        ValueError: A row or file cannot be read, no file belongs to the split, or files of several tables do.
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
            raise ValueError(f"{path}: its ending is {_ending(path)!r}; what can be read are {', '.join(SUFFIXES)}")
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such file or folder{on_hub(path, is_data=True)}")
    if (path / SAVED).is_file():
        return _saved(path)
    every = [file for file in sorted(path.rglob("*")) if _holds_rows(file.relative_to(path)) and file.is_file()]
    chosen = [file for file in every if _belongs(file.relative_to(path), split)]
    if not chosen and not any(_splits_in(part) for file in every for part in file.relative_to(path).parts):
        chosen = every
    if not chosen:
        there = ", ".join(str(file.relative_to(path)) for file in every[:5]) or "none that can be read"
        raise ValueError(
            f"{path}: no file belongs to the split {split!r}; there are {there}: name another split, give one file's "
            f"path, or put {split!r}, and no other split, into the names of its files"
        )
    tables = sorted({f"{file.parent}/*{_ending(file)}" for file in chosen})
    if len(tables) > 1:
        raise ValueError(f"{path}: the split {split!r} has several tables, {' and '.join(tables)}; give one's folder")
    saved = chosen[0].parent
    return _saved(saved) if (saved / SAVED).is_file() else chosen


def _saved(folder: Path) -> list[Path]:
    """Data files listed in a folder of `save_to_disk`; other files in it are caches."""
    try:
        files = [
            folder / Path(entry["filename"]).name for entry in json.loads((folder / SAVED).read_text())["_data_files"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / SAVED}: does not name the files of the data set ({error!r})") from error
    if absent := [file for file in files if not file.is_file()]:
        raise FileNotFoundError(f"{absent[0]}: no such file, and {folder / SAVED} names it")
    return files


def _holds_rows(relative: Path) -> bool:
    """Whether a file below the folder may hold rows; files in hidden folders, such as download caches, do not."""
    hidden = any(part.startswith(".") for part in relative.parts) or relative.name.startswith("cache-")
    return _ending(relative) in SUFFIXES and relative.name not in ABOUT and not hidden


def _belongs(relative: Path, split: str) -> bool:
    """Whether a file belongs to a split, by its own name or that of the nearest folder that names a split.

    A name with several splits, such as train_test.jsonl, belongs to none.
    """
    wanted = SPELLINGS.get(split.lower(), split.lower())
    itself = re.compile(rf"(?<![A-Za-z]){re.escape(split)}(?![A-Za-z]|(?<=[0-9])[0-9])", re.IGNORECASE)
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
    """The suffix of a file, with that of what is compressed: .jsonl.gz."""
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
        raise ValueError(f"{file}: not JSON ({error}); a list of objects is needed") from error
    if not isinstance(rows, list):
        raise ValueError(f"{file}: a list of objects is needed, or one object a line, not {type(rows).__name__}")
    return rows


def _of_csv(file: Path) -> Iterator[dict[str, str]]:
    """Yields the rows of a file with commas, or tabs, and the names of its columns on the first line."""
    csv.field_size_limit(sys.maxsize)
    with opened(file) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text:
        lines = csv.reader(text, delimiter="\t" if ".tsv" in file.suffixes else ",", strict=True)
        with _named(file, (csv.Error, UnicodeDecodeError)):
            header = next(lines, [])
            if twice := {name for name in header if header.count(name) > 1}:
                raise ValueError(f"{file}: the first line names the column {min(twice)!r} twice; rename one")
            for number, cells in enumerate(filter(None, lines), start=1):
                if len(cells) != len(header):
                    raise ValueError(
                        f"{file}, row {number}: {len(cells)} cells, and the first line names {len(header)} columns, "
                        f"{', '.join(header)}; a text with commas or line feeds is written in double quotes"
                    )
                yield dict(zip(header, cells, strict=True))


def _of_table(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a Parquet or Arrow file, with only part of it in memory at a time."""
    try:
        import pyarrow  # an optional dependency, not needed for text
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"{file}: to read it, pip install pyarrow, or convert it to .jsonl") from error
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
    """Raises a ValueError for a Parquet file that would fill the memory: texts do not compress a thousand times."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
    for chunk in chunks:  # a chunk's dictionary may stand for its text in millions of rows
        size, held = chunk.total_uncompressed_size, chunk.total_compressed_size
        if size > max(ORDINARY_BYTES, MOST_COMPRESSED * held):
            raise ValueError(f"column {chunk.path_in_schema} expands from {held:,} to {size:,} bytes; write it anew")
    if metadata.num_rows > MOST_ROWS:
        raise ValueError(f"{metadata.num_rows:,} rows are no problems; write it anew")


def _batches(pyarrow: Any, mapped: Any) -> Iterator[Any]:
    """Yields the record batches of an Arrow file in either format; `datasets` writes streams."""
    try:
        table = pyarrow.ipc.open_file(mapped)
    except pyarrow.ArrowInvalid:
        yield from pyarrow.ipc.open_stream(mapped)
        return
    yield from (table.get_batch(i) for i in range(table.num_record_batches))


@contextmanager
def _named(file: Path, errors_of_library: tuple[type[Exception], ...]) -> Iterator[None]:
    try:
        yield
    except errors_of_library as error:
        raise ValueError(f"{file}: cannot be read as {file.suffix}: {error}") from error
