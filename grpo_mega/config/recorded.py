"""Reads the configuration that a run was started with, with all derived settings, from its config.yaml.

A run directory is not trusted: `${...}` is text, never resolved in the reader's environment, and YAML aliases, with
which a short file expands to gigabytes, are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from yaml.events import AliasEvent

from grpo_mega.models.families import FAMILIES

_TIMESTAMP = "tag:yaml.org,2002:timestamp"


class _Loader(yaml.SafeLoader):
    """YAML without aliases; dates stay text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 as PyYAML has it
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(AliasEvent):
            raise ValueError("it has YAML aliases, which runs never write")
        return super().compose_node(parent, index)


def plain(text: str) -> dict[str, Any]:
    """The values of a recorded configuration, unresolved.

    Raises:
        ValueError: The text is not valid YAML, is not a mapping, or uses aliases.
    """
    try:
        found = yaml.load(text, Loader=_Loader)
    # PyYAML constructs explicit tags without checking them, and raises any kind of error: `!!bool x` is a KeyError.
    except Exception as error:
        raise ValueError(" ".join(str(error).split())) from error
    if not isinstance(found, dict):
        raise ValueError("not the configuration of a run")
    return in_todays_words({str(key): value for key, value in found.items()})


def in_todays_words(values: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded configuration with the current names of settings."""
    model = values.get("model")
    return {**values, "model": families_named({**model})} if isinstance(model, dict) else {**values}


def families_named(model: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings of a model with `family`, for which earlier releases had one setting per family."""
    for family in FAMILIES.values():
        if family.formerly and model.pop(prefix + family.formerly, False):
            model[f"{prefix}family"] = family.name
    return model


def begun(root: str, name: str, fork: str | None = None) -> dict[str, Any]:
    """The configuration of a run that has checkpoints, or else of the run that it forks from; otherwise empty."""
    checkpoints = Path(root) / name / "checkpoints"
    # Names that begin with a dot are temporary: a run that was stopped while it saved its first checkpoint has not
    # begun.
    if not checkpoints.is_dir() or all(entry.name.startswith(".") for entry in checkpoints.iterdir()):
        return written(run_of(fork)) if fork else {}
    return recorded(root, name)


def recorded(root: str, name: str, fork: str | None = None) -> dict[str, Any]:
    """The configuration in the run directory `root`/`name`, or else that of the run it forks from; empty if neither
    can be read."""
    return written(Path(root) / name) or (written(run_of(fork)) if fork else {})


def run_of(checkpoint: str | Path) -> Path:
    """The run directory of a checkpoint."""
    return Path(checkpoint).parent.parent


def written(run: Path) -> dict[str, Any]:
    """The config.yaml of a run directory; empty if it cannot be read."""
    try:
        return plain((run / "config.yaml").read_text())
    # Not an error here: whether the run may be resumed is decided by the identity in run.json.
    except (OSError, ValueError):
        return {}


def container(node: DictConfig) -> dict[str, Any]:
    """The node as a dictionary, interpolations resolved."""
    found = OmegaConf.to_container(node, resolve=True)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}
