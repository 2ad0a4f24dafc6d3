"""Atomic writes: old content or new content, nothing between."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from limits import limit

from grpo_mega.platform.files import make_new, only_one, write_atomic, writing_atomic


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


def test_a_block_that_raises_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(TypeError), writing_atomic(path) as file:
        file.writelines([b"half of the new", "no bytes"])  # type: ignore[list-item]
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_links_under_temporary_names_are_not_followed(tmp_path: Path) -> None:
    precious, folder = tmp_path / "precious", tmp_path / "folder"
    precious.write_text("mine")
    folder.mkdir()
    (folder / "mine").write_text("mine")
    for name, target in (("new", precious), ("made", folder), ("lock", precious)):
        (tmp_path / f".{name}.tmp").symlink_to(target)
    write_atomic(tmp_path / "new", "content")
    make_new(tmp_path / ".made.tmp")
    assert (tmp_path / "new").read_text() == "content"
    assert not (tmp_path / "new").is_symlink()
    assert (tmp_path / ".made.tmp").is_dir()
    assert not (tmp_path / ".made.tmp").is_symlink()
    (tmp_path / ".again.tmp").mkdir()
    write_atomic(tmp_path / "again", "content")
    assert (tmp_path / "again").read_text() == "content"
    (tmp_path / ".locked.lock").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"), only_one(tmp_path / "locked"):
        pass
    assert (precious.read_text(), [file.name for file in folder.iterdir()]) == ("mine", ["mine"])


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "missing" / "file", "text")


CONTENDER = """
import pathlib, sys
from grpo_mega.platform.files import only_one

path, entered = pathlib.Path(sys.argv[1]), 0
while entered < 300:
    try:
        with only_one(path):
            path.with_suffix(".inside").touch(exist_ok=False)
            path.with_suffix(".inside").unlink()
            entered += 1
    except ValueError as refused:
        assert "another process is writing it" in str(refused), refused
"""


def test_one_process_at_a_time_is_let_in_however_often_they_come_and_go(tmp_path: Path) -> None:
    path = tmp_path / "out"
    contenders = [subprocess.Popen([sys.executable, "-c", CONTENDER, path]) for _ in range(4)]
    assert [contender.wait(limit(120)) for contender in contenders] == [0, 0, 0, 0]
    assert os.listdir(tmp_path) == []


def test_one_that_was_killed_inside_keeps_nobody_out(tmp_path: Path) -> None:
    path = tmp_path / "out"
    died = (
        "import os, pathlib, signal, sys\n"
        "from grpo_mega.platform.files import only_one\n"
        "with only_one(pathlib.Path(sys.argv[1])):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", died, path]).returncode == -9
    assert os.listdir(tmp_path) == [".out.lock"]
    with only_one(path), pytest.raises(ValueError, match="out: another process is writing it"), only_one(path):
        pass
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_warned_of_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    with only_one(tmp_path / "out"):
        pass
    assert "out: the file system has no locks" in caplog.text
    assert os.listdir(tmp_path) == []
    assert open_below(tmp_path) == []


def test_a_lock_that_was_removed_meanwhile_is_no_failure(tmp_path: Path) -> None:
    with only_one(tmp_path / "out"):
        assert open_below(tmp_path) == [str(tmp_path / ".out.lock")]
        (tmp_path / ".out.lock").unlink()
    assert open_below(tmp_path) == []


def open_below(folder: Path) -> list[str]:
    """Files of a folder that this process has open; how many it has in all, others change at any time."""
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile, as the one that lists them is
            targets.append(os.readlink(link))
    return [target for target in targets if target.startswith(str(folder))]
