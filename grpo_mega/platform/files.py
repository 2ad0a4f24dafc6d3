"""Files that are either whole or not there."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replaces `path` by `content`: after a crash at any point the file holds its old content or the new one.

    One writer per path at a time; the temporary file a killed writer left is overwritten by the next one.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes a rename in `folder` survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
