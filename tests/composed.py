"""Configurations that many tests look at: composing one takes hydra longer than most tests take."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from grpo_mega.config.load import composed as composed_by_hydra
from grpo_mega.config.load import config_dir, groups, load
from grpo_mega.config.schema import Config


def composed(*words: str, checked: bool = True) -> Config:
    """The configuration of these words, the caller's own; unless `checked`, it may violate rules.

    Hydra composes groups once in a process. It sets single fields when all else is composed, and so they are set here.
    """
    return deepcopy(_once(words, checked))


@cache
def _once(words: tuple[str, ...], checked: bool) -> Config:
    known = _options()
    fields = [word for word in words if word.partition("=")[0].lstrip("+") not in known]
    own = [] if any(word.startswith(("run.init_from=", "~")) for word in words) else fields
    raw = deepcopy(_groups(tuple(word for word in words if word not in own)))
    for override in OverridesParser.create().parse_overrides(own):
        OmegaConf.update(
            raw,
            override.key_or_group,
            override.value(),
            merge=True,
            force_add=override.is_add() or override.is_force_add(),
        )
    return load(raw, checked)


_options = cache(groups)


@cache
def _groups(words: tuple[str, ...]) -> DictConfig:
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return composed_by_hydra(words)
