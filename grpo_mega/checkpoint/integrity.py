"""Checksums of a checkpoint's files: what was written is what is read, or it is not used.

The files are shared out over the ranks, so that a large checkpoint is read by all of them at once. Which files there
are is the main rank's to say: on a shared file system the others may see an older state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from grpo_mega.observe.files import write_atomic

Answer = TypeVar("Answer")

MANIFEST = "manifest.json"
"""{file: [bytes, SHA-256]} of every other file of the checkpoint."""


def seal(path: Path) -> None:
    """Writes the manifest of a checkpoint whose files are all written; every rank must call it."""
    dist.barrier()  # all ranks have written theirs
    names = main_says(lambda: sorted(str(f.relative_to(path)) for f in path.rglob("*") if f.is_file()))
    sums = _checksums(path, names)
    if_all_can(lambda: write_atomic(path / MANIFEST, json.dumps(sums, indent=1)) if dist.get_rank() == 0 else None)


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None when it is whole; every rank must call it and gets the same answer."""
    sealed = main_says(lambda: _manifest(path))
    if isinstance(sealed, str):
        return sealed
    found = _checksums(path, sorted(sealed))
    for name, (size, digest) in sealed.items():
        if name not in found:
            return f"{name} is missing"
        if found[name][0] != size:
            return f"{name} has {found[name][0]} bytes instead of {size}"
        if found[name][1] != digest:
            return f"{name} differs from what was written (SHA-256)"
    return None


def main_says(ask: Callable[[], Answer]) -> Answer:
    """What `ask` answers on the main rank, on all ranks."""
    said = [ask() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(said, src=0)
    return said[0]  # type: ignore[return-value]


def if_all_can(work: Callable[[], None]) -> None:
    """Does `work` on every rank, and ends only when all have done it.

    Raises:
        RuntimeError: It failed on some rank; raised on all of them, so that none waits for another. Names the ranks.
    """
    try:
        work()
        mine = None
    except Exception as error:  # whatever it is, the others must hear of it
        mine = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if failed := [problem for problem in everyone if problem]:
        raise RuntimeError("; ".join(failed))


def _manifest(path: Path) -> dict[str, list] | str:
    """The manifest, or what is wrong with it."""
    try:
        return json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        return f"it has no {MANIFEST}, so it was never finished"
    except ValueError as error:
        return f"its {MANIFEST} is not JSON: {error}"


def _checksums(path: Path, names: list[str]) -> dict[str, list]:
    """{name: [bytes, SHA-256]} of those files that exist; each rank reads its share."""
    mine = {name: _checksum(path / name) for name in names[dist.get_rank() :: dist.get_world_size()]}
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {name: found for name, found in mine.items() if found})
    return {name: found for share in everyone for name, found in share.items()}


def _checksum(file: Path) -> list | None:
    try:
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
            return [content.tell(), digest]
    except FileNotFoundError:
        return None
