"""Checks the training state of a reward model, from its checkpoint, before a run uses the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_mega.config.schema import Config, RewardModelConfig
from grpo_mega.data.tokenizer import Tokenizer, fingerprint


def check_reward_model_state(config: Config, checkpoint: Path, state: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Compares the state of the stage that trained `reward.model.path` with the policy's tokenizer and settings.

    Raises:
        ValueError: The reward model has another tokenizer, or lacks the scale that `reward.model.normalize` needs; or
            settings need scores of steps, which it lacks, or rewards that are never negative.
    """
    path = config.reward.model.path
    if state["tokenizer"] != fingerprint(tokenizer):
        raise ValueError(
            f"reward.model.path={path} was trained with another tokenizer than data.tokenizer={config.data.tokenizer}: "
            "it would read other words than the policy writes; train one with this tokenizer"
        )
    if "separators" in state:
        return
    _refuse_settings_of_steps(config)
    if config.algorithm.advantage_std == "mean":
        raise ValueError(
            "algorithm.advantage_std=mean divides by the mean reward of a group, so no reward may be negative, and the "
            f"scores of reward.model.path={path} may be, as it scores whole answers; set algorithm.advantage_std="
            "sample or none, or name a run with run.trains=process_reward_model, whose scores are probabilities"
        )
    if config.reward.model.normalize and state["scale"] and not state["scale"]["std"] > 0:
        raise ValueError(
            f"{checkpoint} gives every response the same score, which no deviation can normalise; train it for longer"
        )
    if config.reward.model.normalize and not state["scale"]:
        raise ValueError(
            f"{checkpoint} is of a training that has not ended, and only its end measures what scores are normalised "
            "by; let it end, or set reward.model.normalize=false"
        )


def _refuse_settings_of_steps(config: Config) -> None:
    """Raises ValueError when a setting needs scores of steps, which a reward model of whole answers lacks."""
    asked = {
        "algorithm.supervision": (config.algorithm.supervision, "outcome"),
        "reward.model.outcome": (config.reward.model.outcome, RewardModelConfig.outcome),
    }
    for name, (value, fix) in asked.items():
        if value != fix:
            raise ValueError(
                f"{name}={value} is about the scores of steps, and reward.model.path={config.reward.model.path} scores "
                f"whole answers; name a run with run.trains=process_reward_model, or set {name}={fix}"
            )
