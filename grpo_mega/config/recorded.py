"""Reads the configuration that a run was started with, with all derived settings, from its config.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf


def begun(root: str, name: str) -> dict[str, Any]:
    """The configuration in the directory `root`/`name` of a run with checkpoints; else empty."""
    checkpoints = Path(root) / name / "checkpoints"
    if not checkpoints.is_dir() or all(entry.name.startswith(".") for entry in checkpoints.iterdir()):
        return {}
    return recorded(root, name)


def recorded(root: str, name: str) -> dict[str, Any]:
    """The configuration in the directory `root`/`name` of a run; empty if there is none that can be read."""
    try:
        found = OmegaConf.load(Path(root) / name / "config.yaml")
        return container(found) if isinstance(found, DictConfig) else {}
    except Exception:  # a damaged file is no error: run.json has the identity
        return {}


def container(node: DictConfig) -> dict[str, Any]:
    """The node as a dictionary, interpolations resolved."""
    found = OmegaConf.to_container(node, resolve=True)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}
