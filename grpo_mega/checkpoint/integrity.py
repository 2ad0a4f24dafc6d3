"""Checksums of a checkpoint's files: what was written is what is read, or it is not used.

The manifest vouches for what it names, and nothing else is read: a file that was put beside the others is as if it were
not there. It is no signature: whoever can write the folder can write the manifest.

Files whose checksums nobody knows yet are shared out over the ranks. Which files there are is the main rank's to say:
on a shared file system the others may see an older state.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path, PurePosixPath

import torch.distributed as dist

from grpo_mega.platform.collectives import host_group, if_all_can, main_says
from grpo_mega.platform.files import write_atomic

Sums = dict[str, tuple[int, str]]
"""{name of a file: (bytes, SHA-256)}"""

MANIFEST = "manifest.json"
"""{file: [bytes, SHA-256]} of every other file of the checkpoint."""


def seal(path: Path, known: Sums | None = None) -> None:
    """Writes the manifest of a checkpoint whose files are all written; every rank must call it.

    `known` are the sums of files that this rank has taken already; they are not read again.
    """
    dist.barrier(host_group())  # all ranks have written theirs
    seen = main_says(lambda: sorted(str(f.relative_to(path)) for f in path.rglob("*") if f.is_file()))
    sums = _from_all(known or {})
    # A file that its writer summed belongs to the checkpoint although the main rank may not see it yet.
    names = sorted({*seen, *sums})
    sums |= _checksums(path, [name for name in names if name not in sums])

    def write() -> None:
        if lost := [name for name in names if name not in sums]:
            raise FileNotFoundError(f"{path / lost[0]} was there, and no rank can read it")
        if dist.get_rank() == 0:
            write_atomic(path / MANIFEST, json.dumps({name: sums[name] for name in names}, indent=1))

    if_all_can(write)


def damage(path: Path, needed: tuple[str, ...] = ()) -> str | None:
    """What is wrong with a checkpoint, or None when it is whole; every rank must call it and gets the same answer.

    Whole is one whose files are what the manifest says, and whose manifest names at least those `needed`.
    """
    sealed = main_says(lambda: _manifest(path))
    if isinstance(sealed, str):
        return sealed
    for name in needed:
        if name not in sealed:
            return f"its {MANIFEST} does not name {name}"
    found = _checksums(path, sorted(sealed))
    for name, (size, digest) in sealed.items():
        if name not in found:
            return f"{name} is missing"
        if found[name][0] != size:
            return f"{name} has {found[name][0]} bytes instead of {size}"
        if found[name][1] != digest:
            return f"{name} differs from what was written (SHA-256)"
    return None


def vouched(path: Path) -> set[str]:
    """The names of the files that a checkpoint's manifest vouches for.

    Raises:
        ValueError: It has none that can be used.
    """
    sealed = _manifest(path)
    if isinstance(sealed, str):
        raise ValueError(f"the checkpoint {path} cannot be used: {sealed}")
    return {*sealed}


def _manifest(path: Path) -> Sums | str:
    """The manifest, or what is wrong with it."""
    try:
        sealed = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        return f"it has no {MANIFEST}, so it was never finished"
    except (OSError, ValueError, RecursionError) as error:
        return f"its {MANIFEST} is not JSON: {error}"
    if not isinstance(sealed, dict):
        return f"its {MANIFEST} holds no object"
    for name, said in sealed.items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            return f"its {MANIFEST} names {name}, which is no file of the checkpoint"
        if not (isinstance(said, list) and [type(part) for part in said] == [int, str]):
            return f"its {MANIFEST} says {json.dumps(said):.80} of {name} instead of [bytes, SHA-256]"
    return {name: (size, digest) for name, (size, digest) in sealed.items()}


def _checksums(path: Path, names: list[str]) -> Sums:
    """The sums of those files that exist; each rank reads its share."""
    mine = {name: checksum(path / name) for name in names[dist.get_rank() :: dist.get_world_size()]}
    return _from_all({name: found for name, found in mine.items() if found})


def _from_all(mine: Sums) -> Sums:
    """Those of all ranks together."""
    everyone: list[Sums] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine, group=host_group())
    return {name: found for share in everyone for name, found in share.items()}


def checksum(file: Path) -> tuple[int, str] | None:
    """The bytes of a file and their SHA-256; None when there is no such file."""
    if not file.is_file():  # a pipe or a device would be read for ever
        return None
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
        return content.tell(), digest
