"""Stepped environments: those of skyrl-gym, gymnasium and TextArena, recognised by their methods.

Their packages are not imported here. The one tool is `step`, and its argument is the whole call, as text.
"""

from __future__ import annotations

import inspect
import random
from abc import ABC, abstractmethod
from copy import deepcopy
from typing import Any, ClassVar

from grpo_mega.errors import InputError


class Stepped(ABC):
    """An episode of a stepped environment.

    Attributes:
        made: The user's class.
        done: Whether the last step has ended the episode.
        reward, rewards: That of the last step, and the sum over all steps.
    """

    made: ClassVar[type]
    env: Any

    def reset(self, **row: Any) -> str:
        """Begins an episode, and returns the first observation, to be appended to the problem.

        Its seed is the problem's field `seed`, or else one that its group has in common.
        """
        self.done, self.reward, self.rewards = False, 0.0, 0.0
        # The generator was seeded for the group.
        seed = random.getrandbits(31)
        seen = self._begin(int(row.get("seed", seed)), row)
        return f"\n\n{seen}" if seen else ""

    @abstractmethod
    def _begin(self, seed: int, row: dict[str, Any]) -> str:
        """Makes the user's object, resets it, and returns the first observation."""

    def step(self, action: str) -> str:
        """Takes a step.

        Args:
            action: What to do.
        """
        seen, reward, self.done = self._taken(action)
        self.reward = float(reward)
        self.rewards += self.reward
        return seen

    @abstractmethod
    def _taken(self, action: str) -> tuple[str, Any, bool]:
        """What follows a step: the observation, the reward, and whether it was the last one."""

    def get_reward(self) -> float:
        """Sum of the rewards."""
        return self.rewards

    def close(self) -> None:
        """Closes the user's object."""
        self.env.close()


class SkyRL(Stepped):
    """A `BaseTextEnv` of skyrl-gym; the problem's fields are its `extras`."""

    def _begin(self, seed: int, row: dict[str, Any]) -> str:
        takes = inspect.signature(self.made).parameters
        self.env = self.made(**({"extras": row} if "extras" in takes else {}))
        asked = row.get("prompt", "")
        given = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        messages, _ = self.env.init(deepcopy(given))
        if messages[: len(given)] != given:
            raise ValueError("init changes the problem's messages; only adding to them is supported")
        return "\n".join(str(each["content"]) for each in messages[len(given) :])

    def _taken(self, action: str) -> tuple[str, Any, bool]:
        found = self.env.step(action)
        return "\n".join(str(each["content"]) for each in found["observations"]), found["reward"], bool(found["done"])


class Gymnasium(Stepped):
    """An `Env` of gymnasium that takes texts or numbers; the problem's fields are the `options` of its reset."""

    def _begin(self, seed: int, row: dict[str, Any]) -> str:
        self.env = self.made()
        seen, _ = self.env.reset(seed=seed, options=row)
        # Of gymnasium's spaces, only that of numbers has `n`.
        self.read = int if hasattr(getattr(self.env, "action_space", None), "n") else str
        return str(seen)

    def _taken(self, action: str) -> tuple[str, Any, bool]:
        seen, reward, terminated, truncated, _ = self.env.step(self.read(action))
        return str(seen), reward, bool(terminated or truncated)


class TextArena(Stepped):
    """A game of TextArena for one player, which gives its reward at its end: 0 if it is not reached."""

    def _begin(self, seed: int, row: dict[str, Any]) -> str:
        self.env = self.made()
        self.env.reset(num_players=1, seed=seed)
        return self._seen()[1]

    def _taken(self, action: str) -> tuple[str, Any, bool]:
        done, _ = self.env.step(action)
        player, seen = self._seen()
        rewards, _ = self.env.close() if done else ({}, None)
        return seen, rewards.get(player, 0.0), bool(done)

    def _seen(self) -> tuple[int, str]:
        """The player, and what they have been shown since the last time."""
        player, seen = self.env.get_observation()
        if not isinstance(seen, str):
            # The player's words are among them.
            seen = "\n".join(message for sender, message, *_ in seen if sender != player)
        return player, seen


def adapted(made: type, path: str) -> type[Stepped] | None:
    """The stepped environment that a path names as a class that `calls.load` takes; None if it is not one.

    Raises:
        InputError: Its constructor needs arguments that nobody gives, or its methods are async.
    """
    if not callable(getattr(made, "step", None)):
        return None
    reset = getattr(made, "reset", None)
    takes = {*inspect.signature(reset).parameters} if callable(reset) else set()
    # A class of ours may have a tool `step`, and its reset takes the fields of the problem.
    if reset is None and callable(getattr(made, "init", None)):
        adapter: type[Stepped] = SkyRL
    elif "num_players" in takes and callable(getattr(made, "get_observation", None)):
        adapter = TextArena
    elif {"seed", "options"} <= takes:
        adapter = Gymnasium
    else:
        return None
    asked = (getattr(made, name, None) for name in ("reset", "init", "step", "get_observation", "close"))
    if any(map(inspect.iscoroutinefunction, asked)):
        raise InputError(f"environment.path={path}", "is async", "write a class whose tools are `async def`")
    for name, parameter in inspect.signature(made).parameters.items():
        given = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name == "extras"
        if parameter.default is parameter.empty and not given:
            fix = "write a subclass whose __init__ gives it, and name that"
            raise InputError(f"environment.path={path}", f"its __init__ needs {name}", fix)
    return type(made.__name__, (adapter,), {"made": made})
