"""Endless, resumable streams of training prompts."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from grpo_mega.types import Group, Prompt


class PromptSource:
    """Yields the prompts 0, 1, 2, ... of `prompt_at`.

    `prompt_at` is a pure function of the counter, so the order does not depend on the sizes of `take` calls, and
    resuming needs only the counter. `identity` names the stream: loading the state of another stream is an error.
    """

    def __init__(self, prompt_at: Callable[[int], Prompt], identity: str) -> None:
        """Starts at prompt 0."""
        self.prompt_at = prompt_at
        self.identity = identity
        self.cursor = 0

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts."""
        if n < 0:
            raise ValueError(f"cannot take {n} prompts")
        prompts = [self.prompt_at(k) for k in range(self.cursor, self.cursor + n)]
        self.cursor += n
        return prompts

    def learn(self, groups: Iterable[Group]) -> None:
        """Ignores the rewards of a step's groups: this order does not depend on them, unlike `FrontierSource`."""

    def state_dict(self) -> dict[str, Any]:
        """State for `load_state_dict`."""
        return {"cursor": self.cursor, "identity": self.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`. Raises ValueError when it is damaged or belongs to other data."""
        self.cursor = saved_cursor(state, self.identity)


def saved_cursor(state: dict[str, Any], identity: str) -> int:
    """Counter in a saved state. Raises ValueError when it is damaged or belongs to other data."""
    cursor, saved = state.get("cursor"), state.get("identity")
    if saved != identity:
        raise ValueError(f"the saved prompt order is of {saved!r}, this run reads {identity!r}")
    if not isinstance(cursor, int) or cursor < 0:
        raise ValueError(f"the saved prompt order has cursor {cursor!r}; it must be a number from 0")
    return cursor


def in_epoch(prompt: Prompt, epoch: int) -> Prompt:
    """The prompt with the epoch appended to its id (`id#epoch`).

    Sampling noise is keyed by the id, and a prompt must not get the same noise in every epoch.
    """
    return replace(prompt, id=f"{prompt.id}#{epoch}")


def mixed_epochs(
    sources: Sequence[Sequence[Prompt]],
    draws: Sequence[Callable[[int], tuple[int, int]]],
    next_source: Callable[[int], tuple[int, int]],
) -> Callable[[int], Prompt]:
    """Returns the function k -> prompt k of a mixture of sources in endless epochs.

    Args:
        sources: The problems of each source.
        draws: For each source, k -> (epoch, index) of its k-th draw; see `shuffled_draws`.
        next_source: k -> (source, number of its earlier draws) of prompt k; see `mixture`.
    """

    def prompt_at(k: int) -> Prompt:
        source, earlier = next_source(k)
        epoch, i = draws[source](earlier)
        return in_epoch(sources[source][i], epoch)

    return prompt_at


def shuffled_draws(count: int, seed: int | str, difficulties: Sequence[float] = ()) -> Callable[[int], tuple[int, int]]:
    """Returns the function k -> (epoch, index below `count`) of draw k: endless epochs, each shuffled anew.

    With difficulties, one per index, the first epoch is sorted by increasing difficulty. Raises ValueError when `count`
    is 0.
    """
    if not count:
        raise ValueError("there are no prompts to draw from")

    @functools.lru_cache(maxsize=2)
    def order(epoch: int) -> list[int]:
        shuffled = random.Random(f"{seed}/epoch/{epoch}").sample(range(count), count)
        return sorted(shuffled, key=difficulties.__getitem__) if epoch == 0 and difficulties else shuffled

    def draw(k: int) -> tuple[int, int]:
        epoch, within = divmod(k, count)
        return epoch, order(epoch)[within]

    return draw
