"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): prompts in place of those whose groups have no signal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grpo_mega.algorithm.step_advantages import groups_with_signal
from grpo_mega.config.schema import Config
from grpo_mega.rollout.producer import Refill, no_refill
from grpo_mega.stages.batches import advantage_options
from grpo_mega.types import Group, Prompt


def refill_of(config: Config, take: Callable[[int], list[Prompt]]) -> Refill:
    """The refill rule of one step's prompts during generation; `take` gives the next n prompts."""
    return Refilling(config, take) if config.algorithm.groups_without_signal == "refill" else no_refill


class Refilling:
    """Refill that adds a prompt for every group without signal, up to `refill_limit` times the step's prompts.

    So a step uses the shortest prefix of the prompt order in which `prompts_per_step` prompts have signal, or the
    limit: the same prompts whichever groups are complete first.
    """

    def __init__(self, config: Config, take: Callable[[int], list[Prompt]]) -> None:
        """State before the first group of a step."""
        algorithm = config.algorithm
        self._left = (algorithm.refill_limit - 1) * algorithm.prompts_per_step
        self._options, self._take = advantage_options(config), take

    def __call__(self, groups: Sequence[Group]) -> list[Prompt]:
        """Prompts to add for these groups."""
        number = min(groups_with_signal(groups, self._options).count(False), self._left)
        self._left -= number
        return self._take(number)
