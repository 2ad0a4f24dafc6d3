"""Room for an export: an older one at its place makes room for it, but is not given up for one that does not fit."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from grpo_mega.platform import start

start()  # before megatron.core is imported

from grpo_mega.convert.of_run import _make_room  # noqa: E402

TIB = 2**40


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """An export of an earlier start: one file, which would have 1 TiB if it were not sparse."""
    folder = tmp_path / "export" / "step-000002"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").touch()
    os.truncate(folder / "model.safetensors", TIB)
    return folder


def test_an_older_export_stays_when_the_new_one_does_not_fit(tmp_path: Path, older: Path) -> None:
    room = shutil.disk_usage(tmp_path).free + TIB
    with pytest.raises(OSError, match=f"{2 * room:,}") as full:
        _make_room(tmp_path, older, 2 * room, None)
    assert full.value.errno == errno.ENOSPC
    assert [file.name for file in older.iterdir()] == ["model.safetensors"]


def test_neither_when_only_the_next_checkpoint_does_not_fit(tmp_path: Path, older: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-000002"
    shutil.copytree(older, checkpoint, copy_function=lambda a, b: (Path(b).touch(), os.truncate(b, TIB)))
    room = shutil.disk_usage(tmp_path).free + TIB
    with pytest.raises(OSError, match="the next checkpoint"):
        _make_room(tmp_path, older, room, checkpoint)
    assert older.exists()


def test_an_older_export_makes_room(tmp_path: Path, older: Path) -> None:
    _make_room(tmp_path, older, TIB, None)
    assert not older.exists()


def test_without_one_the_free_space_counts(tmp_path: Path) -> None:
    _make_room(tmp_path, tmp_path / "export" / "step-000002", 1, None)
