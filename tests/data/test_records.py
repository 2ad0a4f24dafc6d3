"""Rows of every kind of file and folder are the same rows, and a folder is read by the names of its files."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from grpo_mega.data.problems import load_problems
from grpo_mega.data.records import records
from grpo_mega.data.tokenizer import CharTokenizer

ROWS: list[dict[str, Any]] = [
    {"prompt": f"{i}=?", "answer": str(i), "about": {"level": i, "tags": ["a", "b"]}} for i in range(5)
]


def jsonl(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_json(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.write_text(json.dumps(rows))
    return path


def parquet(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    pyarrow, tables = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    tables.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    return path


def arrow_stream(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    """As `datasets` writes its files."""
    pyarrow = pytest.importorskip("pyarrow")
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table, max_chunksize=2)
    return path


def arrow_file(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table, max_chunksize=2)
    return path


def compressed(write: Any) -> Any:
    def write_compressed(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
        path.write_bytes(gzip.compress(write(path, rows).read_bytes()))
        return path

    return write_compressed


def read(path: Path, split: str = "train") -> list[dict[str, Any]]:
    return [record.fields for record in records(path, split)]


@pytest.mark.parametrize(
    ("write", "suffix"),
    [
        (jsonl, "jsonl"),
        (as_json, "json"),
        (parquet, "parquet"),
        (arrow_stream, "arrow"),
        (arrow_file, "arrow"),
        (jsonl, "json"),
        (compressed(jsonl), "jsonl.gz"),
        (compressed(as_json), "json.gz"),
    ],
)
def test_every_form_has_the_same_rows(tmp_path: Path, write: Any, suffix: str) -> None:
    path = write(tmp_path / f"problems.{suffix}")
    assert read(path) == ROWS
    assert [record.name for record in records(path)] == [f"problems/{n}" for n in range(1, 6)]
    damaged = write(tmp_path / f"damaged.{suffix}", [*ROWS, {"prompt": "1=?", "answer": None, "about": None}])
    with refused("6: field 'answer' | missing"):
        load_problems(damaged, CharTokenizer())


QUOTED = [{"prompt": 'a "b",\n c', "answer": "1"}, {"prompt": "\u00e4; d\te", "answer": "x,y"}]


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv", "rows.csv.gz", "rows.tsv.gz"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_tables_of_spreadsheets_are_read(tmp_path: Path, name: str, encoding: str) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, ["prompt", "answer"], delimiter="\t" if ".tsv" in name else ",")
    writer.writeheader()
    writer.writerows(QUOTED)
    written = text.getvalue().encode(encoding) + b"\r\n"
    (tmp_path / name).write_bytes(gzip.compress(written) if name.endswith("gz") else written)
    assert read(tmp_path / name) == read(tmp_path) == QUOTED
    assert [record.name for record in records(tmp_path / name)] == ["rows/1", "rows/2"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.csv",
            "prompt,answer\n1,2,3\n",
            "a.csv, row 1 | 3 cells, and the first line names 2 columns,",
        ),
        ("a.csv", "prompt,prompt\n1,2\n", "a.csv | names the column 'prompt' twice"),
        ("a.csv", 'prompt,answer\n"1,2\n', "a.csv | cannot be read as .csv: unexpected end of data"),
        ("a.csv", b"prompt,answer\n\xff,2\n", "a.csv | cannot be read as .csv"),
        ("a.jsonl.gz", b"no archive", "a.jsonl.gz | cannot be decompressed"),
        ("a.csv.gz", gzip.compress(b"prompt,answer\n1,2\n" * 99, mtime=0)[:-9], "a.csv.gz | cannot be decompressed"),
        ("a.json", '{"data": [{"prompt": "1", "answer": "1"}]}', "a.json | or one object a line"),
        ("a.xlsx", "", ".xlsx | .jsonl, .json, .csv, .tsv, .jsonl.gz"),
    ],
)
def test_damaged_tables_are_refused_with_the_cure(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with refused(message):
        read(tmp_path / name)


@pytest.mark.parametrize(
    "files",
    [
        ["train.jsonl", "test.jsonl"],
        ["data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"],
        ["test_data/train.jsonl", "test_data/test.jsonl"],
        ["train/0.jsonl", "validation/0.jsonl", "test/0.jsonl"],
        ["gsm8k_train.jsonl", "gsm8k_test.jsonl"],
        ["gsm8k-train.jsonl", "gsm8k-test.jsonl"],
        ["training/0.jsonl", "testing/0.jsonl"],
        ["Train.jsonl", "TEST.jsonl"],
        ["gsm8kTrain.jsonl", "GSM8KTest.jsonl"],
        ["train2.jsonl", "2test.jsonl"],
    ],
)
def test_a_folder_is_read_by_split(tmp_path: Path, files: list[str]) -> None:
    for name in files:
        jsonl(tmp_path / name, [{"file": name}])
    (tmp_path / "README.md").write_text("no rows")
    (tmp_path / "dataset_info.json").write_text("{}")
    jsonl(tmp_path / ".cache" / "train.jsonl", [{"file": "hidden"}])
    jsonl(tmp_path / "cache-train.jsonl", [{"file": "a cache"}])
    (train,), (test,) = read(tmp_path), read(tmp_path, "test")
    assert (train["file"], test["file"]) == (files[0], files[-1])
    with refused(f"{tmp_path} | no file belongs to the split 'other'"):
        read(tmp_path, "other")


@pytest.mark.parametrize(
    ("files", "split"),
    [
        (["math.jsonl", "math_eval.jsonl"], "train"),
        (["math.jsonl", "math_eval.jsonl"], "test"),
        (["a/train.jsonl"], "test"),
        (["train_test.jsonl"], "train"),
        (["Testing.jsonl"], "train"),
    ],
)
def test_files_are_not_taken_for_those_of_another_split(tmp_path: Path, files: list[str], split: str) -> None:
    for name in files:
        jsonl(tmp_path / name)
    with refused(f"{tmp_path} | no file belongs to the split '{split}'; readable files: {', '.join(files)}"):
        read(tmp_path, split)


def test_a_split_may_have_any_name(tmp_path: Path) -> None:
    for name in ("train_hard.jsonl", "fold1.jsonl", "fold10.jsonl", "latest.jsonl"):
        jsonl(tmp_path / name, [{"file": name}])
    for split, name in (("train_hard", "train_hard.jsonl"), ("fold1", "fold1.jsonl"), ("fold10", "fold10.jsonl")):
        assert read(tmp_path, split) == [{"file": name}]
    with pytest.raises(ValueError, match="no file belongs to the split 'test'"):
        read(tmp_path, "test")


def test_the_shards_of_a_split_are_one_after_the_other_and_have_names_of_their_own(tmp_path: Path) -> None:
    for shard in (1, 0):
        jsonl(tmp_path / "data" / f"train-0000{shard}-of-00002.jsonl", [{"shard": shard}, {"shard": shard}])
    assert [row["shard"] for row in read(tmp_path)] == [0, 0, 1, 1]
    assert len({record.name for record in records(tmp_path)}) == 4


def test_files_without_names_of_splits_are_all_read(tmp_path: Path) -> None:
    jsonl(tmp_path / "part-0.jsonl", ROWS[:2])
    jsonl(tmp_path / "part-1.jsonl", ROWS[2:])
    assert read(tmp_path) == ROWS


def test_a_folder_of_several_tables_is_refused_with_their_folders(tmp_path: Path) -> None:
    for table in ("main", "socratic"):
        jsonl(tmp_path / table / "train.jsonl")
    with refused("several | main/*.jsonl and"):
        read(tmp_path)
    assert read(tmp_path / "main") == ROWS


def test_what_save_to_disk_wrote_is_read_by_the_files_it_names(tmp_path: Path) -> None:
    for split, rows in (("train", ROWS[:3]), ("test", ROWS[3:])):
        arrow_stream(tmp_path / split / "data-00000-of-00001.arrow", rows)
        arrow_stream(tmp_path / split / "data-old.arrow", [{"prompt": "of a cache"}])
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": split}
        (tmp_path / split / "state.json").write_text(json.dumps(state))
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    assert read(tmp_path) == read(tmp_path / "train") == ROWS[:3]
    assert read(tmp_path, "test") == ROWS[3:]
    (tmp_path / "test" / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"data-00000-of-00001\.arrow: no such file, and .*state\.json names it"
    ):
        read(tmp_path, "test")


def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, fact in (("{", "not JSON"), ('{"prompt": 1}', "holds a dict")):
        (tmp_path / "a.json").write_text(text)
        with refused(f"a.json | {fact}"):
            read(tmp_path / "a.json")
    (tmp_path / "a.json").write_text('[{"prompt": "1"}, 3]')
    with refused("a.json, row 2 | a JSON object"):
        read(tmp_path / "a.json")
    (tmp_path / "a.parquet").write_text("no table")
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as where it is not installed
    with refused("a.parquet | pip install pyarrow, or convert"):
        read(tmp_path / "a.parquet")


def test_a_file_that_would_fill_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = parquet(tmp_path / "a.parquet", [{"prompt": "x" * 10_000_000, "answer": "1"}])
    assert len(read(path)) == 1
    monkeypatch.setattr("grpo_mega.data.records.ORDINARY_BYTES", 1 << 20)
    monkeypatch.setattr("grpo_mega.data.records.MOST_COMPRESSED", 10)
    with refused("a.parquet | column prompt expands from"):
        read(path)
    monkeypatch.setattr("grpo_mega.data.records.MOST_LINE", 1 << 20)
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as archive:
        archive.write(b'{"prompt": "' + b"x" * (2 << 20))
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz:1: a line of more than 1,048,576 bytes"):
        read(tmp_path / "a.jsonl.gz")


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_damaged_table_is_named(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / f"a.{suffix}").write_bytes(b"no table" * 9)
    with pytest.raises(ValueError, match=rf"a\.{suffix}: cannot be read as \.{suffix}: "):
        read(tmp_path / f"a.{suffix}")
    written = (parquet if suffix == "parquet" else arrow_stream)(tmp_path / f"b.{suffix}").read_bytes()
    (tmp_path / f"b.{suffix}").write_bytes(written[: len(written) // 2])
    with pytest.raises(ValueError, match=rf"b\.{suffix}: cannot be read as"):
        read(tmp_path / f"b.{suffix}")


def test_a_table_whose_rows_are_damaged_is_named(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", [{"prompt": "x" * 1000, "answer": str(i)} for i in range(99)])
    content = bytearray(path.read_bytes())
    content[4 : len(content) // 2] = bytes(len(content) // 2 - 4)  # the footer, which is read first, stays whole
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.parquet: cannot be read as \.parquet: "):
        read(path)
