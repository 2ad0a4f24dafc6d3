"""An endless, resumable stream of training prompts whose whole state is one counter."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace

from grpo_mega.types import Prompt


class PromptSource:
    """Hands out prompt 0, 1, 2, ... of `prompt_at`.

    `prompt_at` is a pure function of the counter, so the order does not depend on how `take` calls cut it, and
    resuming needs nothing but the counter. `identity` says which stream it is: loading the state of another one is an
    error.
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

    def state_dict(self) -> dict[str, int | str]:
        """What `load_state_dict` needs to continue."""
        return {"cursor": self.cursor, "identity": self.identity}

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Continues where `state` was taken. Raises ValueError when it is damaged or belongs to other data."""
        cursor, identity = state.get("cursor"), state.get("identity")
        if identity != self.identity:
            raise ValueError(f"the saved prompt order is of {identity!r}, this run reads {self.identity!r}")
        if not isinstance(cursor, int) or cursor < 0:
            raise ValueError(f"the saved prompt order has cursor {cursor!r}; it must be a number from 0")
        self.cursor = cursor


def shuffled_epochs(prompts: list[Prompt], seed: int) -> Callable[[int], Prompt]:
    """Endless epochs over `prompts`, each in an order that is a function of (seed, epoch).

    The epoch is appended to the prompt's id (`id#epoch`): sampling noise is keyed by it, and a prompt that comes back
    must not get the noise it had before.
    """
    if not prompts:
        raise ValueError("there are no prompts to draw from")
    draw = shuffled_draws(len(prompts), seed)

    def prompt_at(k: int) -> Prompt:
        epoch, i = draw(k)
        return replace(prompts[i], id=f"{prompts[i].id}#{epoch}")

    return prompt_at


def shuffled_draws(count: int, seed: int) -> Callable[[int], tuple[int, int]]:
    """k -> (epoch, which of `count` things) of draw k: endless epochs, each in an order of its own."""

    @functools.lru_cache(maxsize=2)
    def order(epoch: int) -> list[int]:
        return random.Random(f"{seed}/epoch/{epoch}").sample(range(count), count)

    def draw(k: int) -> tuple[int, int]:
        epoch, position = divmod(k, count)
        return epoch, order(epoch)[position]

    return draw
