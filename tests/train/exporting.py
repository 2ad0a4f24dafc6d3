"""Starts tools/export.py, and reads what it writes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import torch
from forks import run_python
from safetensors.torch import load_file
from train_jobs import REPOSITORY

TOOL = str(REPOSITORY / "tools" / "export.py")


def export(
    *words: object, ranks: int = 0, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The tool with these arguments, under torchrun with `ranks` processes, or as a plain process with 0."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    return run_python(*torchrun, TOOL, *words, environment=environment)


def exported(*words: object, ranks: int = 0) -> str:
    """What the tool prints when it writes a folder."""
    done = export(*words, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder by name."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {*index["weight_map"].values()}
    assert files == {file.name for file in folder.glob("*.safetensors")}
    found = {name: tensor for file in files for name, tensor in load_file(folder / file).items()}
    assert found.keys() == index["weight_map"].keys()
    return found


def assert_same(folder: Path, other: Path, apart: tuple[str, ...] = ()) -> None:
    """Both hold the same bits, in tensors whose names do not end with one of `apart`."""
    mine, theirs = weights(folder), weights(other)
    assert mine.keys() == theirs.keys()
    differing = [n for n in mine if mine[n].dtype != theirs[n].dtype or not torch.equal(mine[n], theirs[n])]
    assert [name for name in differing if not name.endswith(apart or "?")] == []


def logits_of_transformers(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """[1, T, V] logits of the folder's model; every tensor of the folder is one of its own."""
    from transformers import AutoModelForCausalLM

    model, said = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", local_files_only=True
    )
    assert not any(said[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return model.eval()(tokens[None]).logits
