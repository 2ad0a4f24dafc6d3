"""Rules checked before anything is built; every violation names the field and the fix.

One file per section. `check_config` needs only the configuration, `check_layout` also the number of processes,
`check_backend` the communication back end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any, TypeAlias

from omegaconf import MISSING, DictConfig, OmegaConf

from grpo_mega.config.limits import idle_problems, limit_problems
from grpo_mega.config.rules.algorithm import algorithm_problems
from grpo_mega.config.rules.data import chat_template_problems, data_problems, wording_problems
from grpo_mega.config.rules.layout import check_backend, check_layout, fewest_processes, layout_problems
from grpo_mega.config.rules.model import model_problems
from grpo_mega.config.rules.optimizer import optimizer_problems, part_problems, state_problems
from grpo_mega.config.rules.reward import reward_problems
from grpo_mega.config.rules.rollout import rollout_problems
from grpo_mega.config.rules.run import run_problems
from grpo_mega.config.rules.shared import refuse
from grpo_mega.config.rules.stages import distill_problems, lora_problems, pairs_problems, stages_problems
from grpo_mega.config.schema import REWARD_MODELS, Config
from grpo_mega.errors import ConfigError, InputError

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
    plain = OmegaConf.to_container(config) if isinstance(config, DictConfig) else asdict(config)
    missing = sorted(_missing(plain, ""))
    model = "run.init_from=FOLDER, a Hugging Face model's, or model=tiny_moe"
    examples = {name: model if name.startswith("model.") else _EXAMPLES.get(name, f"{name}=...") for name in missing}
    refuse(
        InputError(name, "not set", f"give {example}, or an experiment such as experiment=tiny")
        for name, example in examples.items()
    )


def _missing(node: Any, name: str) -> Iterator[str]:
    """Yields the names of required fields below `node` that are not set, as OmegaConf writes them."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _missing(value, f"{name}.{key}" if name else str(key))
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield from _missing(value, f"{name}[{number}]")
    elif node == MISSING:
        yield name


def check_config(config: Config) -> None:
    """Raises one ConfigError that lists the missing required fields, or else every violated rule."""
    # Rules compare values, so they run only once all of them are set.
    check_complete(config)
    rules = (*_OF_ALL, *(_OF_REWARD_MODELS if config.run.trains in REWARD_MODELS else _OF_POLICIES))
    refuse(problem for rule in rules for problem in rule(config))


_Rules: TypeAlias = tuple[Callable[[Config], Iterable[InputError]], ...]
_OF_ALL: _Rules = (
    limit_problems,
    model_problems,
    lora_problems,
    layout_problems,
    lambda config: run_problems(config.run, config.alarms, config.optimizer),
)
_OF_POLICIES: _Rules = (
    idle_problems,
    lambda config: data_problems(config.data, config.run),
    lambda config: reward_problems(config.reward),
    algorithm_problems,
    distill_problems,
    optimizer_problems,
    rollout_problems,
    stages_problems,
)
_OF_REWARD_MODELS: _Rules = (
    # A reward model's run reads no other sections. Settings in them are not reported, because an experiment that a
    # policy and its reward model share gives them for the policy.
    *(partial(idle_problems, section=section) for section in ("model.", "lora.", "layout.", "pairs.", "run.")),
    lambda config: wording_problems("data", config.data, config.data),
    lambda config: chat_template_problems(config.data),
    lambda config: part_problems(config.optimizer, config.model, config.lora),
    lambda config: state_problems(config.optimizer),
    pairs_problems,
)
