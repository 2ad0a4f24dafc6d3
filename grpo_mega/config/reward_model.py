"""Architecture of the reward model that a run uses, read from the reward model's own files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from grpo_mega.config.rules.layout import layout_problems
from grpo_mega.config.rules.model import model_problems
from grpo_mega.config.rules.problems import refuse
from grpo_mega.config.schema import Config, ModelConfig
from grpo_mega.config.trained_model import is_described, read_trained_model
from grpo_mega.errors import InputError

SETTING = "reward.model.path"


def read_reward_model(config: Config) -> ModelConfig | None:
    """Architecture of the run that trained `reward.model.path`, for sequences of this run's length.

    None without a reward model, and where its training configuration is missing (a checkpoint copied out of its run, or
    not yet written by an earlier stage of a recipe). It then has the policy's architecture.

    Raises:
        ValueError: The run's configuration cannot be read; names it.
    """
    path = config.reward.model.path
    if path is None or not is_described(Path(path)):
        return None
    found = read_trained_model(SETTING, path, config.model.context)
    return replace(found.model, context=config.model.context)


def check_reward_model(config: Config, model: ModelConfig) -> None:
    """Raises a ConfigError when the layout cannot split a reward model of this architecture.

    A reward model without experts is replicated over the ranks that share the policy's experts.
    """
    layout = config.layout if model.moe.experts else replace(config.layout, ep=1, etp=1, dispatch="alltoall")
    beside = replace(config, model=model, layout=layout)
    if problems := [*model_problems(beside), *layout_problems(beside)]:
        where = f"{SETTING}={config.reward.model.path}"
        refuse(
            InputError(where, f"this run cannot hold the model: {one.where}: {one.what}", one.fix) for one in problems
        )
