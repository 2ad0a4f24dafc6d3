"""Writes files that are either complete or absent.

Temporary names are predictable, so that the remains of a killed writer are found. Other users may be able to write in
the folder, for example one that a group shares: anything with such a name is removed first, and links are never
followed.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from grpo_mega.errors import InputError

logger = logging.getLogger(__name__)

WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""Error codes of file systems without locks, such as Lustre mounted without -o flock."""


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replaces `path` by `content`: after a crash at any point the file has its old content or the new one.

    One writer per path at a time; the temporary file of a killed writer is overwritten by the next.
    """
    with writing_atomic(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def writing_atomic(path: Path) -> Iterator[IO[bytes]]:
    """Context with a file to write to, which replaces `path` at the end of the block, as `write_atomic` does.

    If the block raises, `path` is unchanged.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    _remove(temporary)
    # Exclusive creation fails if another process puts a file or link there after the removal.
    with temporary.open("xb") as file:
        try:
            yield file
        except BaseException:
            temporary.unlink()
            raise
        # The content must reach the disk before the rename: some file systems write the rename first, and a power loss
        # would then leave an empty file under the final name.
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def make_new(folder: Path) -> None:
    """Creates an empty folder, removing anything that exists at its path. The parent must exist."""
    _remove(folder)
    folder.mkdir()


def _remove(path: Path) -> None:
    """Removes the file, link or folder at this path, and nothing that a link leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Context that only one process can enter for a `path` at a time, over all machines that see the folder.

    Other processes are refused until it ends; a killed process does not keep the lock. On a file system without locks,
    a warning says that nothing is protected.

    Raises:
        InputError: Another process is in the block.
    """
    file = path.with_name(f".{path.name}.lock")
    lock = _locked(file, path)
    try:
        yield
    finally:
        try:
            # Removed while still locked: a process that opens the file afterwards creates a new one, and one that
            # opened it before notices in `_locked` that it is gone.
            file.unlink(missing_ok=True)
        finally:
            os.close(lock)


@contextmanager
def one_after_another(file: Path) -> Iterator[None]:
    """Holds a lock on `file`, which is created and stays; waits while another process holds it.

    On file systems without locks it does not wait.
    """
    lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _locked(file: Path, path: Path) -> int:
    """Takes the lock of a file, which is created if missing, without waiting; returns its descriptor."""
    while True:
        lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous holder may have removed the file between our open and our lock, which then protects nothing.
            if os.path.samestat(os.fstat(lock), file.stat()):
                return lock
        except BlockingIOError:
            os.close(lock)
            raise InputError(str(path), "another process is writing it", "wait for it, or choose another") from None
        except FileNotFoundError:
            # The holder of the lock has just finished and removed the file: try again with a new one.
            pass
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                os.close(lock)
                raise
            logger.warning("%s: the file system has no locks (%s); let no other command write this", path, error)
            return lock
        os.close(lock)


def sync_folder(folder: Path) -> None:
    """Makes a rename in `folder` survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
