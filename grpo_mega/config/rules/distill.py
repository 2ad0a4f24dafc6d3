"""Rules about on-policy distillation; the teacher's own files are checked in `config/teacher.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from operator import attrgetter

from grpo_mega.config.schema import Config, DistillConfig


def distill_problems(config: Config) -> Iterator[str]:
    """A message for each setting that is incompatible with a teacher, or has no effect without one."""
    distill, algorithm = config.distill, config.algorithm
    if not distill.teacher:
        for field in fields(DistillConfig):
            if (value := getattr(distill, field.name)) != field.default:
                yield (
                    f"distill.{field.name}={value} has no effect without a teacher; set distill.teacher, or leave "
                    f"distill.{field.name} out"
                )
        return
    if distill.served and config.rollout.temperature != 1:
        yield (
            f"rollout.temperature={config.rollout.temperature:g} does not go with distill.teacher={distill.teacher}: "
            "SGLang scores a text at temperature 1; set rollout.temperature=1, or name the teacher's files"
        )
    if not distill.served and distill.timeout_seconds != DistillConfig.timeout_seconds:
        yield (
            f"distill.timeout_seconds={distill.timeout_seconds:g} is for a teacher that is a server, http://HOST:PORT; "
            "leave it out"
        )
    own = "gives every token an advantage of its own"
    refused = {
        "algorithm.advantage_baseline": (
            algorithm.advantage_baseline == "critic",
            "mean",
            "takes the place of a critic's advantages",
        ),
        "algorithm.objective": (algorithm.objective in ("gspo", "gmpo", "vespo"), "ppo or gspo_token", own),
        "algorithm.groups_without_signal": (
            algorithm.groups_without_signal != "count",
            "count",
            "has something to say of every group",
        ),
    }
    if not distill.reward_coef:
        only = "with distill.reward_coef=0 leaves rewards without effect"
        refused |= {
            "algorithm.kl_in": (algorithm.kl_in == "reward", "loss", only),
            "algorithm.supervision": (algorithm.supervision == "process", "outcome", only),
        }
    for name, (is_set, instead, why) in refused.items():
        if is_set:
            yield (
                f"{name}={attrgetter(name)(config)} does not go with distill.teacher={distill.teacher}, which {why}; "
                f"set {name}={instead}, or distill.teacher=null"
            )
