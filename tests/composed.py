"""Configurations that many tests look at: composing one takes hydra longer than most tests take."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

from grpo_mega.config.load import compose_config
from grpo_mega.config.schema import Config


def composed(*words: str) -> Config:
    """The configuration of these words, the caller's own; composed once in a process."""
    return deepcopy(_once(words))


@cache
def _once(words: tuple[str, ...]) -> Config:
    return compose_config([*words])
