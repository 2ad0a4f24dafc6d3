"""Rules that a configuration must keep before anything is built; every violation names the field and the way out.

One file per room. `check_config` needs the configuration only, `check_layout` also the number of processes,
`check_backend` what they communicate with.
"""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from grpo_mega.config.bounds import field_problems
from grpo_mega.config.rules.algorithm import algorithm_problems
from grpo_mega.config.rules.data import data_problems
from grpo_mega.config.rules.layout import check_backend, check_layout, fewest_processes, layout_problems
from grpo_mega.config.rules.model import model_problems
from grpo_mega.config.rules.problems import ConfigError, refuse
from grpo_mega.config.rules.reward import reward_problems
from grpo_mega.config.rules.rollout import rollout_problems
from grpo_mega.config.rules.run import run_problems
from grpo_mega.config.rules.stages import stages_problems
from grpo_mega.config.schema import Config

__all__ = ["ConfigError", "check_backend", "check_complete", "check_config", "check_layout", "fewest_processes"]

_EXAMPLES = {
    "run.name": "run.name=my_run",
    "run.steps": "run.steps=60",
    "optimizer.lr": "optimizer.lr=3e-4",
    "data.task": "data=chain_sum",
    "reward.terms": "reward=think_answer",
}


def check_complete(config: Config | DictConfig) -> None:
    """Raises a ConfigError that lists every required field that is not set, with an override that sets it."""
    missing = sorted(OmegaConf.missing_keys(config))
    refuse([f"{name} is not set; give {_example(name)}, or an experiment such as experiment=tiny" for name in missing])


def check_config(config: Config) -> None:
    """Raises one ConfigError that lists every rule the configuration violates, or first every field nobody set."""
    check_complete(config)
    refuse(
        [
            *field_problems(config),
            *model_problems(config),
            *layout_problems(config),
            *data_problems(config),
            *reward_problems(config.reward),
            *algorithm_problems(config),
            *rollout_problems(config),
            *stages_problems(config),
            *run_problems(config),
        ]
    )


def _example(name: str) -> str:
    return _EXAMPLES.get(name, "model=tiny_moe" if name.startswith("model.") else f"{name}=...")
