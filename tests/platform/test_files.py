"""Atomic writes: old content or new content, nothing between."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mega.platform.files import write_atomic


@pytest.mark.parametrize("content", ["text with é\n", b"\x00\xff", ""])
def test_replaces_what_was_there_and_leaves_nothing_else(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "file"
    path.write_text("something longer than the new content")
    write_atomic(path, content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert os.listdir(tmp_path) == ["file"]


def test_a_writer_killed_before_the_rename_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    program = (
        "import os, pathlib, signal, sys\n"
        "from grpo_mega.platform.files import write_atomic\n"
        "os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_atomic(pathlib.Path(sys.argv[1]), 'new')\n"
    )
    died = subprocess.run([sys.executable, "-c", program, str(path)])
    assert died.returncode == -9
    assert path.read_text() == "old"
    assert len(os.listdir(tmp_path)) == 2

    write_atomic(path, "next")
    assert path.read_text() == "next"
    assert os.listdir(tmp_path) == ["file"]


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "missing" / "file", "text")
