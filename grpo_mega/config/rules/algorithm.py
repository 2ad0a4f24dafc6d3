"""Rules about the algorithm."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from operator import attrgetter

from grpo_mega.config.rules.reward import reward_problems
from grpo_mega.config.rules.terms import lowest
from grpo_mega.config.schema import AlgorithmConfig, Config, CriticConfig, RewardConfig
from grpo_mega.config.schema.terms import SCORE_STEPS

LARGEST_FACTOR = 10
"""Logarithm of the largest factor that VESPO may give a sequence; the paper's factors are 1.2 at most."""


def algorithm_problems(config: Config) -> Iterator[str]:
    """A message for each rule that the settings of the algorithm violate."""
    yield from _size_problems(config)
    yield from _reward_model_problems(config)
    yield from _refill_problems(config)
    yield from _critic_problems(config)
    yield from _clipping_problems(config.algorithm)
    yield from _shape_problems(config.algorithm)
    yield from _kl_problems(config)
    yield from _supervision_problems(config)
    yield from _correction_problems(config.algorithm)
    yield from _advantage_problems(config)


def _size_problems(config: Config) -> Iterator[str]:
    """A message when a step has too few samples for its mini-batches, or a group too few for its baseline."""
    algorithm = config.algorithm
    samples = algorithm.prompts_per_step * algorithm.group_size
    if 0 < samples < algorithm.mini_batches:
        yield (
            f"algorithm.mini_batches={algorithm.mini_batches} exceeds the {samples} samples of a step "
            f"(prompts_per_step * group_size); lower it to {samples}"
        )
    taught = config.distill.teacher and not config.distill.reward_coef  # then advantages do not come from rewards
    if algorithm.group_size == 1 and not taught and algorithm.advantage_baseline not in ("batch", "critic"):
        yield (
            f"algorithm.group_size=1: algorithm.advantage_baseline={algorithm.advantage_baseline} is relative to the "
            "group, and a group of 1 has no others; set it to 2 or more"
        )


def _clipping_problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    """A message for each bound of the importance ratio that the objective does not use, or misses."""
    if algorithm.objective in ("cispo", "sapo", "gmpo", "vespo") and algorithm.dual_clip is not None:
        yield (
            f"algorithm.dual_clip={algorithm.dual_clip} has no effect on algorithm.objective={algorithm.objective}; "
            "set it to null"
        )
    instead = {
        "sapo": "whose sigmoid has algorithm.tau_pos and algorithm.tau_neg instead",
        "vespo": "whose factor has algorithm.vespo_k_pos and its like instead",
    }.get(algorithm.objective)
    if instead and (algorithm.clip_low, algorithm.clip_high) != (0.2, 0.2):
        yield (
            f"algorithm.clip_low={algorithm.clip_low} and algorithm.clip_high={algorithm.clip_high} have no effect on "
            f"algorithm.objective={algorithm.objective}, {instead}; leave them at 0.2"
        )
    updates = algorithm.epochs * algorithm.mini_batches
    if algorithm.objective == "cispo" and algorithm.clip_low == algorithm.clip_high == 0 and updates > 1:
        yield (
            f"algorithm.epochs={algorithm.epochs} and algorithm.mini_batches={algorithm.mini_batches} make {updates} "
            "updates of a rollout, and with algorithm.clip_low=0 and algorithm.clip_high=0 there is no importance "
            "ratio that would correct those after the first; set both to 1, or algorithm.objective=ppo and bounds"
        )


def _shape_problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    """A message for each parameter of SAPO or VESPO that is unused or extreme."""
    if algorithm.objective != "sapo" and (algorithm.tau_pos, algorithm.tau_neg) != (1.0, 1.05):
        yield (
            f"algorithm.tau_pos={algorithm.tau_pos} and algorithm.tau_neg={algorithm.tau_neg} have an effect on "
            f"algorithm.objective=sapo alone, not on {algorithm.objective}; leave them out"
        )
    for sign in ("pos", "neg") if algorithm.objective == "vespo" else ():
        k, rate = getattr(algorithm, f"vespo_k_{sign}"), getattr(algorithm, f"vespo_lambda_{sign}")
        if 0 < k < math.inf and 0 < rate < math.inf and k * math.log(k / rate) + rate - k > LARGEST_FACTOR:
            yield (
                f"algorithm.vespo_k_{sign}={k} and algorithm.vespo_lambda_{sign}={rate}: the factor of a sequence, 1 "
                f"on policy, would be more than e^{LARGEST_FACTOR} at a ratio of {k / rate:.3g}; choose numbers "
                "that are nearer to each other"
            )
    if algorithm.objective != "vespo":
        for field in fields(AlgorithmConfig):
            if field.name.startswith("vespo_") and (value := getattr(algorithm, field.name)) != field.default:
                yield (
                    f"algorithm.{field.name}={value} has an effect on algorithm.objective=vespo alone, not on "
                    f"{algorithm.objective}; leave it out"
                )


def _kl_problems(config: Config) -> Iterator[str]:
    """A message for each setting of the KL term that has no effect or is incompatible with others."""
    algorithm = config.algorithm
    if algorithm.kl_in == "reward":
        yield from _kl_in_reward_problems(algorithm)
    if algorithm.kl_unbiased and algorithm.kl_coef == 0:
        yield "algorithm.kl_unbiased=true has no effect without a KL term; set algorithm.kl_coef above 0 or drop it"
    if algorithm.reference_refresh > 0 and algorithm.kl_coef == 0:
        yield (
            f"algorithm.reference_refresh={algorithm.reference_refresh} has no effect without a KL term; "
            "set algorithm.kl_coef above 0, or algorithm.reference_refresh=0"
        )


def _correction_problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    """A message for each setting of the mismatch correction that has no effect because there is none."""
    if algorithm.correction != "none":
        return
    idle = {
        "correction_floor": 0.0,
        "correction_cap": 2.0,
        "correction_level": "token",
        "correction_normalized": False,
    }
    for name, default in idle.items():
        value = getattr(algorithm, name)
        if value != default:
            yield (
                f"algorithm.{name}={str(value).lower()} has no effect with algorithm.correction=none; set "
                f"algorithm.correction=mask or truncate, or algorithm.{name}={str(default).lower()}"
            )


def _reward_model_problems(config: Config) -> Iterator[str]:
    """A message for each setting that requires step scores of every term, which a reward model does not have."""
    if config.reward.model.path is not None and config.algorithm.terms_apart:
        yield (
            "algorithm.terms_apart=True does not go with reward.model.path, whose score is one number that is added "
            "to the total; set algorithm.terms_apart=false"
        )


def _critic_problems(config: Config) -> Iterator[str]:
    """A message for each setting that is incompatible with a critic, or that needs one and has none."""
    if config.algorithm.advantage_baseline == "critic":
        yield from _incompatible_with_critic(config)
        return
    for field in fields(CriticConfig):
        if (value := getattr(config.critic, field.name)) != field.default:
            yield (
                f"critic.{field.name}={value} has no effect with algorithm.advantage_baseline="
                f"{config.algorithm.advantage_baseline}; set that to critic, or leave critic.{field.name} out"
            )


def _incompatible_with_critic(config: Config) -> Iterator[str]:
    """A message for each setting that is incompatible with a critic."""
    algorithm = config.algorithm
    refused = {
        "algorithm.advantage_std": (algorithm.advantage_std not in ("batch", "none"), "batch or none"),
        "algorithm.groups_without_signal": (algorithm.groups_without_signal != "count", "count"),
        "algorithm.terms_apart": (algorithm.terms_apart, "false"),
        "algorithm.objective": (algorithm.objective in ("gspo", "gmpo", "vespo"), "ppo or gspo_token"),
    }
    for name, (is_set, instead) in refused.items():
        if is_set:
            value = str(attrgetter(name)(config)).lower()
            yield (
                f"{name}={value} does not go with algorithm.advantage_baseline=critic, which gives every token an "
                f"advantage of its own; set {name}={instead}"
            )
    for name, set_to, nothing in (
        ("lora.rank", config.lora.rank, "0"),
        ("optimizer.frozen", config.optimizer.frozen, "[]"),
    ):
        if set_to:
            yield (
                f"{name}={set_to} does not go with algorithm.advantage_baseline=critic, whose whole model is trained; "
                f"set {name}={nothing}, or another baseline"
            )
    if 0 < config.run.steps <= config.critic.alone_steps:
        yield (
            f"critic.alone_steps={config.critic.alone_steps} leaves none of run.steps={config.run.steps} to the "
            f"policy; lower it to {config.run.steps - 1} or less"
        )


def _kl_in_reward_problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    """A message for each setting that is incompatible with a KL term in the reward."""
    if algorithm.kl_coef == 0:
        yield "algorithm.kl_in=reward has no effect without a KL term; set algorithm.kl_coef above 0, or kl_in to loss"
        return
    refused = {
        "kl_unbiased": (algorithm.kl_unbiased, "false", "is about a KL term in the loss"),
        "terms_apart": (algorithm.terms_apart, "false", "has no total reward that it could lower"),
        "advantage_std": (
            algorithm.advantage_std in ("mean", "sample", "population") and not algorithm.terms_apart,
            "none",
            "divides by what is left of a group of equal rewards, the penalties' rounding,",
        ),
        "groups_without_signal": (algorithm.groups_without_signal != "count", "count", "drops by the reward alone"),
    }
    for name, (is_set, other, why) in refused.items():
        if is_set:
            value = str(getattr(algorithm, name)).lower()
            yield (
                f"algorithm.{name}={value} {why}, and does not go with algorithm.kl_in=reward; "
                f"set algorithm.{name}={other} or algorithm.kl_in=loss"
            )


def _refill_problems(config: Config) -> Iterator[str]:
    """A message for each setting that is incompatible with, or required by, refilling groups without signal."""
    algorithm = config.algorithm
    if algorithm.groups_without_signal != "refill":
        if algorithm.refill_limit != AlgorithmConfig.refill_limit:
            yield (
                f"algorithm.refill_limit={algorithm.refill_limit} has no effect with algorithm.groups_without_signal="
                f"{algorithm.groups_without_signal}; set that to refill, or leave algorithm.refill_limit out"
            )
    elif config.reward.model.path is not None:
        yield (
            "algorithm.groups_without_signal=refill asks for a group's rewards while others are generated, and the "
            f"reward model reward.model.path={config.reward.model.path} scores when all are; set "
            "algorithm.groups_without_signal=drop"
        )


def _supervision_problems(config: Config) -> Iterator[str]:
    """A message for each setting that is incompatible with rewards of steps."""
    algorithm = config.algorithm
    if algorithm.supervision != "process":
        return
    sequence = "has one ratio and one advantage for a whole completion"
    refused = {
        "advantage_baseline": (algorithm.advantage_baseline != "mean", "mean", "is of the rewards of completions"),
        "advantage_std": (
            algorithm.advantage_std not in ("sample", "population", "none"),
            "sample",
            "is of the rewards of completions",
        ),
        "terms_apart": (algorithm.terms_apart, "false", "normalises each term of a completion's reward"),
        "kl_in": (algorithm.kl_in == "reward", "loss", "lowers the rewards of completions"),
        "objective": (
            algorithm.objective in ("gspo", "gmpo", "vespo"),
            "gspo_token" if algorithm.objective == "gspo" else "ppo",
            sequence,
        ),
    }
    for name, (is_set, other, why) in refused.items():
        if is_set:
            value = str(getattr(algorithm, name)).lower()
            yield (
                f"algorithm.{name}={value} {why}, and does not go with algorithm.supervision=process; set "
                f"algorithm.{name}={other} or algorithm.supervision=outcome"
            )
    terms = [term for term in config.reward.terms if term.weight]
    learned = config.reward.model.path is not None  # only its file says whether it scores steps
    if terms and not learned and not any(term.function or term.built_in in SCORE_STEPS for term in terms):
        yield (
            "algorithm.supervision=process rewards steps, and no term of the reward scores them; add a function of "
            f"your own, a term of the kinds {', '.join(SCORE_STEPS)} or a process reward model, or set "
            "algorithm.supervision=outcome"
        )


def _advantage_problems(config: Config) -> Iterator[str]:
    """A message for each rule that the settings of the advantages violate."""
    algorithm = config.algorithm
    baseline, std = algorithm.advantage_baseline, algorithm.advantage_std
    if baseline == "batch" and std in ("sample", "population", "mean"):
        yield (
            f"algorithm.advantage_baseline=batch does not go with algorithm.advantage_std={std}, which is the group's; "
            "set algorithm.advantage_std=batch or none"
        )
    elif std == "mean" and baseline != "mean":
        yield (
            f"algorithm.advantage_std=mean divides what the mean was subtracted from, not algorithm.advantage_baseline="
            f"{baseline}; set algorithm.advantage_baseline=mean"
        )
    if std == "mean":
        yield from _negative_rewards(config.reward)
    if baseline == "batch" and algorithm.groups_without_signal != "count":
        yield (
            f"algorithm.groups_without_signal={algorithm.groups_without_signal} drops none with "
            "algorithm.advantage_baseline=batch, with which equal rewards have advantages, too; set it to count"
        )
    if algorithm.terms_apart and (baseline == "batch" or std not in ("sample", "population")):
        yield (
            f"algorithm.terms_apart=true makes terms comparable by their deviation in the group, not by "
            f"algorithm.advantage_baseline={baseline} and algorithm.advantage_std={std}; set "
            "algorithm.advantage_baseline=mean and algorithm.advantage_std=sample"
        )


def _negative_rewards(reward: RewardConfig) -> Iterator[str]:
    """A message if a reward can be negative, which the mean of a group, as divisor, does not allow.

    Of a reward model only its file says whether it scores steps, whose probabilities are not negative, or whole
    answers, which `check_reward_model_state` refuses.
    """
    if any(reward_problems(reward)):  # they come first: the bounds of a term follow from valid options
        return
    lows = {
        f"reward.terms[{index}] ({term.name}, weight {term.weight:g})": (lowest(term), term.tasks)
        for index, term in enumerate(reward.terms)
    }
    if reward.model.path is not None:
        lows[f"reward.model.weight={reward.model.weight:g}"] = min(0.0, reward.model.weight), []
    for task in sorted({"", *(task for term in reward.terms for task in term.tasks)}):
        own = {field: low for field, (low, tasks) in lows.items() if not tasks or task in tasks}
        if sum(own.values()) < 0:
            yield (
                "algorithm.advantage_std=mean divides by the mean reward of a group, so no reward may be negative, and "
                f"{min(own, key=lambda field: own[field])} can make one so; remove it, or set algorithm.advantage_std="
                "sample or none"
            )
            return
