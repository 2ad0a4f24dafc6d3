"""Rules about sampling, and about settings of the engine that is not in use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

from grpo_mega.config.rules.problems import at_most
from grpo_mega.config.rules.sglang import sglang_problems
from grpo_mega.config.schema import Config, RolloutConfig, SGLangConfig


def rollout_problems(config: Config) -> Iterator[str]:
    """A message for each rule that the settings of the rollouts violate."""
    rollout = config.rollout
    yield from at_most(config, "rollout.max_new_tokens", "model.context", margin=1)
    if rollout.longer_max_new_tokens:
        yield from at_most(config, "rollout.longer_max_new_tokens", "model.context", margin=1)
        yield from at_most(config, "rollout.max_new_tokens", "rollout.longer_max_new_tokens", margin=1)
    if (rollout.longer_from_step is None) != (rollout.longer_max_new_tokens is None):
        yield (
            f"rollout.longer_from_step={rollout.longer_from_step} and rollout.longer_max_new_tokens="
            f"{rollout.longer_max_new_tokens} go together; give both, or leave both null"
        )
    if rollout.engine == "sglang":
        yield from _settings_of_the_embedded_engine(config)
        yield from sglang_problems(config)
    else:
        yield from at_most(config, "algorithm.group_size", "rollout.concurrent_sequences")
        yield from at_most(config, "eval.samples", "rollout.concurrent_sequences")
        yield from _settings_of_sglang(rollout)


def _settings_of_the_embedded_engine(config: Config) -> Iterator[str]:
    """A message for each setting of the embedded engine, which next to SGLang samples only for a base model's gate."""
    given, default = config.rollout.concurrent_sequences, RolloutConfig().concurrent_sequences
    if given != default and not config.base.train:
        yield (
            f"rollout.concurrent_sequences={given} has no effect with rollout.engine=sglang and base.train=false; give "
            f"rollout.concurrent_sequences={default}, or rollout.engine=embedded"
        )


def _settings_of_sglang(rollout: RolloutConfig) -> Iterator[str]:
    for name, default in vars(SGLangConfig()).items():
        given = getattr(rollout.sglang, name)
        if given != default:
            undone = " ".join(_overrides_to_default(given, default, f"rollout.sglang.{name}"))
            yield (
                f"rollout.sglang.{name} has no effect with rollout.engine={rollout.engine}; give {undone}, or "
                "rollout.engine=sglang"
            )


def _overrides_to_default(value: Any, default: Any, name: str) -> list[str]:
    """Overrides that reset a field and those below it to their defaults."""
    if is_dataclass(value):
        pairs = vars(value).items()
        return [
            one for key, inner in pairs for one in _overrides_to_default(inner, getattr(default, key), f"{name}.{key}")
        ]
    if value == default:
        return []
    if isinstance(value, dict):
        return [f"~{name}.{key}" for key in value]
    return [f"{name}={default if isinstance(default, str) else json.dumps(default)}"]
