"""Checksums of a checkpoint's files: a checkpoint is refused if its files differ from what was written.

Only files that the manifest names are read; any other file in the folder is ignored. The manifest is not a signature:
whoever can write the folder can also write the manifest.

Checksums are computed by all ranks, each for a share of the files. The main rank lists the files, because on a shared
file system other ranks may see an older state.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist

from grpo_mega.errors import InputError
from grpo_mega.platform.collectives import from_main_rank, host_group, succeed_together
from grpo_mega.platform.files import write_atomic
from grpo_mega.platform.manifest import MANIFEST, Sums, checksum, difference, read_manifest


def seal(path: Path, known: Sums | None = None) -> None:
    """Writes the manifest of a checkpoint whose files are all written; every rank must call it.

    `known` has checksums that this rank has already computed; their files are not read again.
    """
    # Without the barrier the main rank would list files that other ranks are still writing.
    dist.barrier(host_group())
    seen = from_main_rank(lambda: sorted(str(f.relative_to(path)) for f in path.rglob("*") if f.is_file()))
    sums = _gathered(known or {})
    # A file with a checksum belongs to the checkpoint even if the main rank cannot see it yet.
    names = sorted({*seen, *sums})
    sums |= checksums(path, [name for name in names if name not in sums])

    def write() -> None:
        # Checked on every rank with the same data, so all ranks fail or none.
        if lost := [name for name in names if name not in sums]:
            raise FileNotFoundError(f"{path / lost[0]} was listed, and no rank can read it")
        if dist.get_rank() == 0:
            write_atomic(path / MANIFEST, json.dumps({name: sums[name] for name in names}, indent=1))

    succeed_together(write)


def damage(path: Path, needed: tuple[str, ...] = ()) -> str | None:
    """Describes the damage of a checkpoint, None if it is intact; every rank must call it, and gets the same result.

    A checkpoint is intact when its files have the checksums of the manifest, and the manifest names all files `needed`.
    """
    manifest = from_main_rank(lambda: read_manifest(path))
    if isinstance(manifest, str):
        return manifest
    for name in needed:
        if name not in manifest:
            return f"its {MANIFEST} does not name {name}"
    return difference(manifest, checksums(path, sorted(manifest)))


def files_in_manifest(path: Path) -> set[str]:
    """Names of the files in a checkpoint's manifest, relative to the checkpoint.

    Raises:
        InputError: The manifest is missing or cannot be read.
    """
    manifest = read_manifest(path)
    if isinstance(manifest, str):
        raise InputError(str(path), f"the checkpoint cannot be used: {manifest}", "choose another")
    return {*manifest}


def checksums(path: Path, names: list[str]) -> Sums:
    """Checksums of those files that exist; every rank must call it, and each reads its share."""
    # Every rank must get the same list in the same order, or some files would be read twice and others never.
    mine = {name: checksum(path / name) for name in names[dist.get_rank() :: dist.get_world_size()]}
    return _gathered({name: of_file for name, of_file in mine.items() if of_file})


def _gathered(mine: Sums) -> Sums:
    """Checksums of all ranks in one dict."""
    everyone: list[Sums] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine, group=host_group())
    return {name: of_file for share in everyone for name, of_file in share.items()}
