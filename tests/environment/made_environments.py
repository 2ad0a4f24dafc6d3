"""Environments of the tests, as a user writes them: without an import of ours."""

from __future__ import annotations

import os
import random
from typing import Literal


class Counter:
    """Adds up what it is told; its secret differs from problem to problem."""

    def reset(self, answer: str, **row: object) -> None:
        self.answer, self.told, self.secret = answer, [], random.randint(0, 9)

    def tell(self, number: str) -> str:
        """Notes a number.

        Args:
            number: Digits.
        """
        self.told.append(number)
        return f"{len(self.told)}{self.secret}{random.randint(0, 9)}"

    def get_reward(self) -> float:
        return len(self.told) + self.secret / 10


class Ending(Counter):
    """Ends with the first number that differs from one before."""

    def reset(self, answer: str, **row: object) -> None:
        super().reset(answer, **row)
        self.done = False

    def tell(self, number: str) -> str:
        """Notes a number."""
        said = super().tell(number)
        self.done = len({*self.told}) > 1
        return said


class Done(Counter):
    """Has a tool with the name of the attribute that ends an episode."""

    def done(self, number: str) -> str:
        return number


def double(number: int) -> int:
    """Doubles a number."""
    return 2 * number


def join(first: str, second: str = "z") -> str:
    return first + second


def take(how: Literal["up", "down"], most: float | None = None, of: list[str] | None = None) -> str:
    return f"{how} {most} {of}"


class Broken:
    """Does what the call says."""

    def reset(self, **row: object) -> None:
        self.said: list[str] = []

    def act(self, what: str) -> object:
        self.said.append(what)
        if what == "raise":
            raise ValueError("no")
        if what == "exit":
            os._exit(3)
        if what == "wait":
            with open(os.environ["WAITS_FOR"], "rb", buffering=0) as pipe:
                pipe.read(1)
        if what == "hang":
            while True:
                pass
        return {"none": None, "bytes": b"\xff", "nan": float("nan"), "long": "7" * 10**7, "lone": "\ud800"}.get(
            what, what
        )


class Judge(Broken):
    """Gives the reward that was said last."""

    def get_reward(self) -> object:
        if self.said[-1:] == ["fail"]:
            raise ValueError("no reward")
        return {"none": None, "nan": float("nan")}.get(self.said[-1], float(len(self.said)))
