"""Environments of the tests that wait, as a user writes them: `async def`, without an import of ours."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

from made_environments import Counter


class Meets:
    """No call returns before as many are under way as its problem says; the secret is that of the problem."""

    under_way: dict[int, int] = {}  # noqa: RUF012 (of all objects)
    met = asyncio.Condition()

    async def reset(self, answer: str, **row: object) -> str:
        self.most, self.told, self.secret = int(answer), "", random.randint(0, 9)
        await asyncio.sleep(0)
        return f"{self.secret}"

    async def tell(self, word: str) -> str:
        """Waits for the others.

        Args:
            word: What to say then.
        """
        drawn = random.randint(0, 9)
        self.told += word
        turn = len(self.told)
        async with self.met:
            self.under_way[turn] = self.under_way.get(turn, 0) + 1
            self.met.notify_all()
            await self.met.wait_for(lambda: self.under_way[turn] % self.most == 0)
        return f"{self.told}{self.secret}{drawn}"

    async def get_reward(self) -> float:
        await asyncio.sleep(0)
        return len(self.told) + self.secret / 10


class WaitingCounter(Counter):
    """The same after a wait."""

    async def tell(self, number: str) -> str:
        """Notes a number."""
        said = super().tell(number)
        await asyncio.sleep(0)
        return said

    async def get_reward(self) -> float:
        await asyncio.sleep(0)
        return super().get_reward()


class Breaks:
    """Does what the call says, once four samples have called: the folder `CALLED` has a file of each."""

    def reset(self, id: str, **row: object) -> None:
        self.id, self.said = id, ""

    async def act(self, what: str) -> str:
        """Acts.

        Args:
            what: How.
        """
        folder = Path(os.environ["CALLED"])
        (folder / self.id.replace("/", "-")).touch()
        while len([*folder.iterdir()]) < 4:
            await asyncio.sleep(0.001)
        if what == "exit":
            os._exit(3)
        if what == "block":
            time.sleep(1000)
        if what == "hang":
            await asyncio.Event().wait()
        if what == "fork":
            os.fork()
        if what == "raise":
            raise ValueError("no")
        self.said += what
        return self.said


def own_loop(word: str) -> str:
    """Waits by itself."""

    async def waited() -> str:
        await asyncio.sleep(0)
        return word

    return asyncio.run(waited())


class Hostile:
    """Does what the call says to the others, which wait in between."""

    def reset(self, **row: object) -> str:
        asyncio.get_running_loop()
        return "7" * 40

    async def act(self, what: str) -> str:
        """Acts.

        Args:
            what: How.
        """
        folder = Path(os.environ["CALLED"])
        (folder / f"{what}{time.monotonic_ns()}").touch()
        while len([*folder.iterdir()]) < 4:
            await asyncio.sleep(0.001)
        again = len([*folder.iterdir()]) > 4
        connection = int(sys.argv[3])
        if what == "forged" and not again:
            for number in range(100):
                os.write(connection, json.dumps({"number": number}).encode() + b"\n")
        if what == "deep" and not again:
            os.write(connection, b"[" * 200_000 + b"\n")
        if what == "cancels" and not again:
            for task in asyncio.all_tasks():
                task.cancel()
        if what == "busy":
            time.sleep(float(os.environ["BUSY"]))
        for _ in range(5):
            await asyncio.sleep(0.05)
        return what


class Unclosed(Breaks):
    """Its `close` hangs."""

    async def close(self) -> None:
        await asyncio.Event().wait()


class Draws:
    """Replies with a number that it draws before it waits."""

    def reset(self, **row: object) -> None:
        pass

    async def draw(self, word: str) -> str:
        drawn = random.randint(0, 10**9)
        await asyncio.sleep(0)
        return str(drawn)


def logged(tool: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(tool)
    def called(*arguments: object, **named: object) -> object:
        return tool(*arguments, **named)

    return called


@logged
async def wrapped(word: str) -> str:
    return word


def decorated(word: str) -> str:
    """Says a word."""
    return asyncio.sleep(0.01, word)
