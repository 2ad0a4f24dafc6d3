"""Reads the configuration that a run was started with, with all derived settings, from its config.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf


def begun(root: str, name: str, fork: str | None = None) -> dict[str, Any]:
    """The configuration of a run with checkpoints of its own, or with one to `fork` from; else empty."""
    checkpoints = Path(root) / name / "checkpoints"
    if not checkpoints.is_dir() or all(entry.name.startswith(".") for entry in checkpoints.iterdir()):
        return written(run_of(fork)) if fork else {}
    return recorded(root, name)


def recorded(root: str, name: str, fork: str | None = None) -> dict[str, Any]:
    """The configuration in the directory `root`/`name` of a run, or in that of the checkpoint that it forks from.

    Empty if there is none that can be read.
    """
    return written(Path(root) / name) or (written(run_of(fork)) if fork else {})


def run_of(checkpoint: str | Path) -> Path:
    """The run directory of a checkpoint."""
    return Path(checkpoint).parent.parent


def written(run: Path) -> dict[str, Any]:
    """The config.yaml of a run directory; empty if there is none that can be read."""
    try:
        found = OmegaConf.load(run / "config.yaml")
        return container(found) if isinstance(found, DictConfig) else {}
    except Exception:  # a damaged file is no error: run.json has the identity
        return {}


def container(node: DictConfig) -> dict[str, Any]:
    """The node as a dictionary, interpolations resolved."""
    found = OmegaConf.to_container(node, resolve=True)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}
