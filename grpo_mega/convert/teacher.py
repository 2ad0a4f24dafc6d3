"""Loading of the teacher of on-policy distillation, from a run, a checkpoint or a Hugging Face folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from grpo_mega.checkpoint import checkpoint
from grpo_mega.checkpoint.integrity import checksums
from grpo_mega.checkpoint.model_state import folder_of, refuse_adapters
from grpo_mega.convert import source
from grpo_mega.models.reference import Teacher
from grpo_mega.platform.collectives import from_main_rank
from grpo_mega.platform.manifest import MANIFEST
from grpo_mega.weights import directory as huggingface

POLICY = "policy"
"""Role of a teacher in the run that trained it."""


def load_teacher(path: Path, teacher: Teacher) -> None:
    """Loads the teacher's weights, and computes its `checksum`; every rank must call it.

    Raises:
        FileNotFoundError: The path does not exist.
        ValueError: The model is damaged, of another architecture, or has separate adapters.
    """
    if huggingface.is_model(path) and not (path / checkpoint.STATE).is_file():
        huggingface.load_weights(path, teacher)
        teacher.checksum = _of_folder(path)
        return
    found = source.find(path)
    refuse_adapters(found.path, folder_of(POLICY))
    source.read(found, teacher, POLICY)
    manifest = from_main_rank((found.path / MANIFEST).read_bytes)  # the manifest has the checksums of all other files
    teacher.checksum = hashlib.sha256(manifest).hexdigest()


def _of_folder(path: Path) -> str:
    """SHA-256 of the checksums of all files of a folder's weights; each rank reads its share."""
    files = from_main_rank(lambda: sorted(file.name for file in path.glob("*.safetensors")))
    sums = checksums(path, [huggingface.CONFIG, *files])
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()
