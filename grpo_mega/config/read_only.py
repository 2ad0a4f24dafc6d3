"""Configuration for reading a trained model in an evaluation, a recipe's pool or an export: layout and engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_mega.config.load import explained, load
from grpo_mega.config.rules import check_layout
from grpo_mega.config.schema import Config, LayoutConfig, SGLangConfig
from grpo_mega.config.typed import literal
from grpo_mega.errors import InputError

LAYOUT = "layout."
"""Prefix of the settings that may differ when a model is read; all others are from its training."""


def read_under(trained: Config, words: Sequence[str], world_size: int) -> Config:
    """Configuration with the layout in which `world_size` processes read a trained model.

    The layout is given by `words`, such as layout.tp=2. Without words it is that of training if it fits the processes;
    otherwise every process holds the whole model.

    Raises:
        InputError: The words are not a layout, or the processes do not fit it.
    """
    if wrong := [word for word in words if not word.startswith(LAYOUT)]:
        raise InputError(wrong[0], "fixed by the model's training", f"give only settings of {LAYOUT}*")
    if not words and world_size > 1:
        try:
            check_reading(without_engines(trained), world_size)
        # Where the layout of training does not fit, every process holds the whole model instead.
        except InputError:
            pass
        else:
            return trained
    # Rules of training require a sequence to fit one micro-batch.
    alone = LayoutConfig(micro_batch_tokens=max(trained.model.context, LayoutConfig().micro_batch_tokens))
    raw = OmegaConf.create(literal(asdict(replace(trained, layout=alone))))
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), raw, OmegaConf.from_dotlist([*words]))
    except (OmegaConfBaseException, ValueError) as error:
        raise explained(error, words) from error
    config = load(cast(DictConfig, merged))
    check_reading(without_engines(config), world_size)
    return config


def without_engines(config: Config) -> Config:
    """Configuration with the embedded engine in place of separate engines, and without their settings.

    The embedded engine must hold all completions of one prompt at once, which other engines divide freely.
    """
    rollout, samples = config.rollout, max(config.algorithm.group_size, config.eval.samples)
    if rollout.engine != "embedded":
        rollout = replace(
            rollout,
            engine="embedded",
            sglang=SGLangConfig(),
            concurrent_sequences=max(rollout.concurrent_sequences, samples),
        )
    return replace(config, rollout=rollout)


def check_reading(config: Config, world_size: int) -> None:
    """Checks the layout as `check_layout` does, without what only training requires of it."""
    # Overlapped reduction needs several replicas, and the prompts of a step must be divisible by their number, as
    # `world_size` always is.
    optimizer = replace(config.optimizer, overlap=False)
    algorithm = replace(config.algorithm, prompts_per_step=world_size)
    check_layout(replace(config, optimizer=optimizer, algorithm=algorithm), world_size)
