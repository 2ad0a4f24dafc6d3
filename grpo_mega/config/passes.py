"""Decides which passes of log-probs a step makes before its updates: stages make them, the planner counts them."""

from __future__ import annotations

import math

from grpo_mega.config.schema import AlgorithmConfig, Config


def corrects_beyond_tokens(algorithm: AlgorithmConfig) -> bool:
    """Whether the correction for the engine needs to know whole sequences or the batch, not one token alone."""
    rejects = algorithm.rejection_floor > 0 or algorithm.rejection_cap < math.inf
    return rejects or algorithm.correction_level != "token" or algorithm.correction_normalized


def needs_old_logprobs(config: Config) -> bool:
    """Whether something is computed from the old policy's log-probs before the first update of a step."""
    algorithm = config.algorithm
    if config.distill.teacher:  # advantages compare the teacher's log-probs with them
        return True
    if algorithm.advantage_baseline == "critic":  # in steps that train the critic alone, the policy makes no other pass
        return True
    return algorithm.kl_in == "reward" or corrects_beyond_tokens(algorithm)


def is_on_policy(config: Config) -> bool:
    """Whether the old policy's log-probs need no pass: a step's single update begins at that policy itself."""
    return config.algorithm.epochs * config.algorithm.mini_batches == 1 and not needs_old_logprobs(config)
