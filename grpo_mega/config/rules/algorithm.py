"""Rules about the algorithm."""

from __future__ import annotations

import math
from collections.abc import Iterator

from grpo_mega.config.rules.reward import lowest, reward_problems
from grpo_mega.config.rules.shared import clashes
from grpo_mega.config.schema import AlgorithmConfig, Config, DistillConfig, RewardConfig
from grpo_mega.config.schema.terms import SCORE_STEPS
from grpo_mega.errors import InputError

LARGEST_FACTOR = 10
"""Logarithm of the largest factor that VESPO may give a sequence; the paper's factors are 1.2 at most."""
OF_SEQUENCES = ("gspo", "gmpo", "vespo")
"""Objectives with one importance ratio and one advantage for a whole completion."""


def algorithm_problems(config: Config) -> Iterator[InputError]:
    """An error for each rule that the settings of the algorithm violate."""
    algorithm = config.algorithm
    yield from _size_problems(algorithm, config.distill)
    if config.reward.model.path is not None:
        yield from _reward_model_problems(config)
    if algorithm.advantage_baseline == "critic":
        yield from _critic_problems(config)
    yield from _objective_problems(algorithm)
    if algorithm.kl_in == "reward" and algorithm.kl_coef:
        yield from _kl_in_reward_problems(config)
    if algorithm.supervision == "process":
        yield from _supervision_problems(config)
    yield from _advantage_problems(algorithm)
    if algorithm.advantage_std == "mean":
        yield from _negative_rewards(config.reward)


def _size_problems(algorithm: AlgorithmConfig, distill: DistillConfig) -> Iterator[InputError]:
    """An error when a step has too few samples for its mini-batches, or a group too few for its baseline."""
    samples = algorithm.prompts_per_step * algorithm.group_size
    if 0 < samples < algorithm.mini_batches:
        yield InputError(
            f"algorithm.mini_batches={algorithm.mini_batches}",
            f"more than the {samples} samples of a step (prompts_per_step * group_size)",
            f"lower it to {samples}",
        )
    # Where only the teacher makes the advantages, a group needs no second sample to be compared with.
    taught = distill.teacher and not distill.reward_coef
    if algorithm.group_size == 1 and not taught and algorithm.advantage_baseline not in ("batch", "critic"):
        yield InputError(
            "algorithm.group_size=1",
            f"algorithm.advantage_baseline={algorithm.advantage_baseline} compares the samples of a group",
            "set it to 2 or more",
        )


def _reward_model_problems(config: Config) -> Iterator[InputError]:
    """An error for each setting that needs more of a reward model than one score, when all samples are generated."""
    refused = {
        "algorithm.terms_apart": (config.algorithm.terms_apart, "false", "its score is one number, added to the total"),
        "algorithm.groups_without_signal": (
            config.algorithm.groups_without_signal == "refill",
            "drop",
            "it scores when all groups are generated, and refilling needs rewards before that",
        ),
    }
    yield from clashes(config, f"reward.model.path={config.reward.model.path}", refused, "reward.model.path=null")


def _objective_problems(algorithm: AlgorithmConfig) -> Iterator[InputError]:
    """An error for parameters of CISPO or VESPO that leave updates uncorrected, or factors without bound."""
    updates = algorithm.epochs * algorithm.mini_batches
    if algorithm.objective == "cispo" and algorithm.clip_low == algorithm.clip_high == 0 and updates > 1:
        yield InputError(
            f"algorithm.epochs={algorithm.epochs}",
            f"with algorithm.mini_batches={algorithm.mini_batches} a rollout has {updates} updates, and "
            "algorithm.clip_low=0 and algorithm.clip_high=0 leave no importance ratio to correct those after the first",
            "set both to 1, or algorithm.objective=ppo and bounds",
        )
    for sign in ("pos", "neg") if algorithm.objective == "vespo" else ():
        k, rate = getattr(algorithm, f"vespo_k_{sign}"), getattr(algorithm, f"vespo_lambda_{sign}")
        if 0 < k < math.inf and 0 < rate < math.inf and k * math.log(k / rate) + rate - k > LARGEST_FACTOR:
            yield InputError(
                f"algorithm.vespo_k_{sign}={k}",
                f"with algorithm.vespo_lambda_{sign}={rate} the factor of a sequence, 1 on policy, would exceed "
                f"e^{LARGEST_FACTOR} at a ratio of {k / rate:.3g}",
                "choose numbers that are closer to each other",
            )


def _critic_problems(config: Config) -> Iterator[InputError]:
    """An error for each setting that is incompatible with a critic."""
    algorithm = config.algorithm
    each = "every token has its own advantage"
    whole = "the critic's whole model is trained"
    refused = {
        "algorithm.advantage_std": (algorithm.advantage_std not in ("batch", "none"), "batch or none", each),
        "algorithm.groups_without_signal": (algorithm.groups_without_signal != "count", "count", each),
        "algorithm.terms_apart": (algorithm.terms_apart, "false", each),
        "algorithm.objective": (algorithm.objective in OF_SEQUENCES, "ppo or gspo_token", each),
        "lora.rank": (config.lora.rank, "0", whole),
        "optimizer.frozen": (config.optimizer.frozen, "[]", whole),
    }
    yield from clashes(config, "algorithm.advantage_baseline=critic", refused, "choose another baseline")
    if 0 < config.run.steps <= config.critic.alone_steps:
        yield InputError(
            f"critic.alone_steps={config.critic.alone_steps}",
            f"leaves none of run.steps={config.run.steps} to the policy",
            f"lower it to {config.run.steps - 1} or less",
        )


def _kl_in_reward_problems(config: Config) -> Iterator[InputError]:
    """An error for each setting that is incompatible with a KL term in the reward."""
    algorithm = config.algorithm
    by_group = algorithm.advantage_std in ("mean", "sample", "population") and not algorithm.terms_apart
    refused = {
        "algorithm.kl_unbiased": (algorithm.kl_unbiased, "false", "it is for a KL term in the loss"),
        "algorithm.terms_apart": (algorithm.terms_apart, "false", "there is no total reward to lower"),
        "algorithm.advantage_std": (
            by_group,
            "none",
            "in a group of equal rewards it would divide by the rounding errors of the penalties",
        ),
        "algorithm.groups_without_signal": (
            algorithm.groups_without_signal != "count",
            "count",
            "groups are dropped by their rewards alone",
        ),
    }
    yield from clashes(config, "algorithm.kl_in=reward", refused, "algorithm.kl_in=loss")


def _supervision_problems(config: Config) -> Iterator[InputError]:
    """An error for each setting that is incompatible with rewards of steps."""
    algorithm = config.algorithm
    whole = "it is computed from the rewards of whole completions"
    refused = {
        "algorithm.advantage_baseline": (algorithm.advantage_baseline != "mean", "mean", whole),
        "algorithm.advantage_std": (
            algorithm.advantage_std not in ("sample", "population", "none"),
            "sample",
            whole,
        ),
        "algorithm.terms_apart": (algorithm.terms_apart, "false", "it normalises the terms of whole completions"),
        "algorithm.kl_in": (algorithm.kl_in == "reward", "loss", "it lowers the rewards of whole completions"),
        "algorithm.objective": (
            algorithm.objective in OF_SEQUENCES,
            "gspo_token" if algorithm.objective == "gspo" else "ppo",
            "it has one ratio and one advantage for a whole completion",
        ),
    }
    yield from clashes(config, "algorithm.supervision=process", refused, "algorithm.supervision=outcome")
    terms = [term for term in config.reward.terms if term.weight]
    # Whether a reward model scores steps is known only from its file, which is read later.
    learned = config.reward.model.path is not None
    if terms and not learned and not any(term.function or term.built_in in SCORE_STEPS for term in terms):
        yield InputError(
            "algorithm.supervision=process",
            "no reward term scores steps",
            f"add your own function, a term of kind {', '.join(SCORE_STEPS)} or a process reward model, or set "
            "algorithm.supervision=outcome",
        )


def _advantage_problems(algorithm: AlgorithmConfig) -> Iterator[InputError]:
    """An error for each baseline and divisor that are incompatible with each other, or with what they act on."""
    baseline, std = algorithm.advantage_baseline, algorithm.advantage_std
    # Baseline and divisor must be of the same samples: the batch, or the group.
    if baseline == "batch" and std in ("sample", "population", "mean"):
        yield InputError(
            "algorithm.advantage_baseline=batch",
            f"incompatible with algorithm.advantage_std={std}, which is the group's",
            "set algorithm.advantage_std=batch or none",
        )
    elif std == "mean" and baseline != "mean":
        yield InputError(
            "algorithm.advantage_std=mean",
            f"divides what the mean was subtracted from, not algorithm.advantage_baseline={baseline}",
            "set algorithm.advantage_baseline=mean",
        )
    if baseline == "batch" and algorithm.groups_without_signal != "count":
        yield InputError(
            f"algorithm.groups_without_signal={algorithm.groups_without_signal}",
            "no effect with algorithm.advantage_baseline=batch, where groups of equal rewards have advantages too",
            "set it to count",
        )
    if algorithm.terms_apart and (baseline == "batch" or std not in ("sample", "population")):
        yield InputError(
            "algorithm.terms_apart=true",
            "terms are made comparable by their deviation in the group, not by "
            f"algorithm.advantage_baseline={baseline} and algorithm.advantage_std={std}",
            "set algorithm.advantage_baseline=mean and algorithm.advantage_std=sample",
        )


def _negative_rewards(reward: RewardConfig) -> Iterator[InputError]:
    """An error if a reward can be negative, which a group's mean as divisor does not allow.

    Whether a reward model scores steps, by probabilities that are never negative, or whole completions is known only
    from its file; `check_reward_model_state` refuses the latter.
    """
    # The bounds of a term follow from its options, and only valid options can be read; the others are reported anyway.
    if any(reward_problems(reward)):
        return
    lows = {
        f"reward.terms[{index}] ({term.name}, weight {term.weight:g})": (lowest(term), term.tasks)
        for index, term in enumerate(reward.terms)
    }
    if reward.model.path is not None:
        lows[f"reward.model.weight={reward.model.weight:g}"] = min(0.0, reward.model.weight), []
    # A term may score some tasks only, so each task has its own sum; "" stands for tasks that no term names.
    for task in sorted({"", *(task for term in reward.terms for task in term.tasks)}):
        lows_of_task = {field: low for field, (low, tasks) in lows.items() if not tasks or task in tasks}
        if sum(lows_of_task.values()) < 0:
            yield InputError(
                "algorithm.advantage_std=mean",
                "divides by the mean reward of a group, which must not be negative, and "
                f"{min(lows_of_task, key=lambda field: lows_of_task[field])} can make it negative",
                "remove that term, or set algorithm.advantage_std=sample or none",
            )
            return
