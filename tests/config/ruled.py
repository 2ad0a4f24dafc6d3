"""Configurations with other values, and the problems that the rules find in them."""

from __future__ import annotations

from copy import deepcopy
from operator import attrgetter

from composed import composed

from grpo_mega.config.rules import check_config, check_layout
from grpo_mega.config.schema import Config
from grpo_mega.errors import ConfigError, InputError

TINY = ("experiment=tiny", "layout=single")
DENSE = ("experiment=tiny_dense",)


def with_values(start: Config | tuple[str, ...], values: dict[str, object]) -> Config:
    """A configuration, or the one of these words, with other values."""
    config = composed(*start) if isinstance(start, tuple) else deepcopy(start)
    for name, value in values.items():
        *path, leaf = name.split(".")
        setattr(attrgetter(".".join(path))(config), leaf, value)
    return config


def problems_of(config: Config, world_size: int | None = None) -> list[InputError]:
    """The problems that the error lists, or nothing when the configuration is accepted."""
    try:
        check_config(config) if world_size is None else check_layout(config, world_size)
    except ConfigError as error:
        return error.problems
    return []
