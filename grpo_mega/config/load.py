"""From the command line to a checked `Config`: importing this module makes the schema known to hydra."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf

from grpo_mega.config.rules import check_complete, check_config
from grpo_mega.config.schema import Config

ConfigStore.instance().store(name="config_schema", node=Config)

_MAY_CHANGE = frozenset({
    "run.steps",
    "run.eval_every",
    "run.save_every",
    "run.async_save",
    "run.keep_checkpoints",
    "run.keep_every",
    "run.print_every",
    "run.samples_per_step",
    "run.tensorboard",
    "run.root",
    "rollout.concurrent_sequences",
    "optimizer.overlap",
})  # fmt: skip
_MAY_CHANGE_WHOLE = ("layout.", "cluster.", "rollout.sglang.")


def config_dir() -> Path:
    """The folder of hydra groups, beside the package.

    Raises:
        FileNotFoundError: The package was installed without the repository around it.
    """
    folder = Path(__file__).resolve().parents[2] / "configs"
    if not (folder / "config.yaml").is_file():
        raise FileNotFoundError(f"{folder}/config.yaml is missing; run from a clone, installed with `pip install -e .`")
    return folder


def load(raw: DictConfig) -> Config:
    """The typed configuration behind what hydra composed.

    Raises:
        ConfigError: Required fields are not set, or rules are violated; the message lists all of them.
        omegaconf.errors.ConfigKeyError: A field that the schema does not have.
    """
    # Hydra lets `+model.new=1` through; merging into a fresh schema refuses it.
    typed = cast(DictConfig, OmegaConf.merge(Config, OmegaConf.to_container(raw, resolve=True)))
    check_complete(typed)
    config = cast(Config, OmegaConf.to_object(typed))
    check_config(config)
    return config


def compose_config(overrides: list[str]) -> Config:
    """The configuration that the entry point would see with `overrides` as its command line."""
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return load(compose("config", overrides))


def explained(error: HydraException) -> str:
    """What hydra refuses, in a line that says where to look."""
    if isinstance(error, MissingConfigException):
        return " ".join(str(error).partition("Config search path")[0].split())
    cause = f" ({str(error.__cause__).splitlines()[0]})" if error.__cause__ else ""
    return f"{str(error).splitlines()[0]}{cause}; fields are in grpo_mega/config/schema.py, options in configs/"


def to_yaml(config: Config) -> str:
    """The whole configuration as YAML, every field written out."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def identity(config: Config) -> dict[str, object]:
    """Dotted name -> value of every field that must not change when a run directory is continued.

    How long the run is, where it lies, what it reports and keeps, and what changes numbers by rounding at most (the
    layout, the machines, how generation and reduction are cut, how engines are run) may change. List items are named by
    position, for example `reward.terms[0].weight`; all values fit in JSON.
    """
    leaves = _flat(asdict(config), "")
    return {name: value for name, value in leaves if name not in _MAY_CHANGE and not name.startswith(_MAY_CHANGE_WHOLE)}


def _flat(node: object, name: str) -> list[tuple[str, object]]:
    if isinstance(node, dict):
        return [leaf for key, child in node.items() for leaf in _flat(child, f"{name}.{key}".lstrip("."))]
    if isinstance(node, list):
        return [leaf for index, child in enumerate(node) for leaf in _flat(child, f"{name}[{index}]")]
    return [(name, node)]
