"""The algorithm."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_mega.config.schema import Config


def algorithm_problems(config: Config) -> Iterator[str]:
    """What the settings of the algorithm break."""
    algorithm = config.algorithm
    samples = algorithm.prompts_per_step * algorithm.group_size
    if 0 < samples < algorithm.mini_batches:
        yield (
            f"algorithm.mini_batches={algorithm.mini_batches} exceeds the {samples} samples of a step "
            f"(prompts_per_step * group_size); lower it to {samples}"
        )
    if algorithm.objective == "cispo" and algorithm.dual_clip is not None:
        yield f"algorithm.dual_clip={algorithm.dual_clip} has no effect on algorithm.objective=cispo; set it to null"
    if algorithm.reference_refresh > 0 and algorithm.kl_coef == 0:
        yield (
            f"algorithm.reference_refresh={algorithm.reference_refresh} has no effect without a KL term; "
            "set algorithm.kl_coef above 0, or algorithm.reference_refresh=0"
        )
