"""Manifest of a folder: sizes and checksums of its files, to detect changed files.

It is not a signature: whoever can write the folder can also write the manifest.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path, PurePosixPath

Sums = dict[str, tuple[int, str]]
"""{file name: (bytes, SHA-256)}."""

MANIFEST = "manifest.json"
"""File with {file name: [bytes, SHA-256]} of all other files of the folder."""


def read_manifest(path: Path) -> Sums | str:
    """A folder's manifest, or a description of what is wrong with it."""
    # Reading a pipe would block until a writer appears.
    if (path / MANIFEST).exists() and not (path / MANIFEST).is_file():
        return f"its {MANIFEST} is not a regular file"
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        return f"it has no {MANIFEST}, so it was never finished"
    except (OSError, ValueError, RecursionError) as error:
        return f"its {MANIFEST} is not JSON: {error}"
    if not isinstance(manifest, dict):
        return f"its {MANIFEST} is not a JSON object"
    for name, entry in manifest.items():
        # A manifest may come from outside; its names must not lead out of the folder.
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            return f"its {MANIFEST} names {name}, which is not a file of the checkpoint"
        # Types are compared exactly, since JSON's true is an int for isinstance.
        if not (isinstance(entry, list) and [type(part) for part in entry] == [int, str]):
            return f"its {MANIFEST} says {json.dumps(entry):.80} of {name} instead of [bytes, SHA-256]"
    return {name: (size, digest) for name, (size, digest) in manifest.items()}


def checksum(file: Path) -> tuple[int, str] | None:
    """Size and SHA-256 of a file; None when there is no such file."""
    # Reading a pipe or a device might never end.
    if not file.is_file():
        return None
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
        return content.tell(), digest


def difference(written: Sums, there: Sums) -> str | None:
    """First file that differs from the manifest, and how; None when there is none."""
    for name, (size, digest) in written.items():
        if name not in there:
            return f"{name} is missing"
        if there[name][0] != size:
            return f"{name} has {there[name][0]} bytes instead of {size}"
        if there[name][1] != digest:
            return f"{name} differs from what was written (SHA-256)"
    return None


def damage_beside_weights(path: Path) -> str | None:
    """Damage of the files in the folder itself, such as a tokenizer's; None without a manifest."""
    manifest = read_manifest(path)
    if isinstance(manifest, str):
        return None
    written = {name: entry for name, entry in manifest.items() if "/" not in name}
    return difference(written, {name: entry for name in written if (entry := checksum(path / name))})
