"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): more prompts for those whose groups have no signal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grpo_mega.algorithm.step_advantages import groups_with_signal
from grpo_mega.config.schema import Config
from grpo_mega.rollout.producer import Refill, no_refill
from grpo_mega.stages.batches import advantage_options
from grpo_mega.types import Group, Prompt


def refill_of(config: Config, take: Callable[[int], list[Prompt]]) -> Refill:
    """How the prompts of one step are added to while their answers are generated; `take` gives the next n prompts."""
    return Refilling(config, take) if config.algorithm.groups_without_signal == "refill" else no_refill


class Refilling:
    """Gives one more prompt for every group without signal, until the step has drawn `refill_limit` times its prompts.

    So the prompts of a step are the first ones in their order of which `prompts_per_step` have groups with signal, or
    the most that it may draw: the same ones whichever groups are complete first.
    """

    def __init__(self, config: Config, take: Callable[[int], list[Prompt]]) -> None:
        """Before the first group of a step."""
        algorithm = config.algorithm
        self._left = (algorithm.refill_limit - 1) * algorithm.prompts_per_step
        self._options, self._take = advantage_options(config), take

    def __call__(self, groups: Sequence[Group]) -> list[Prompt]:
        """The prompts that are added because of these groups."""
        number = min(groups_with_signal(groups, self._options).count(False), self._left)
        self._left -= number
        return self._take(number)
