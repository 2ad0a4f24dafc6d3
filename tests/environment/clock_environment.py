"""An environment that is not a function of its calls, and that can kill the trainer in the middle of one."""

from __future__ import annotations

import os
import signal
import time

from agents import CLOSE, post, user

KILL_AT, TRAINER = "CLOCK_KILLS_AT", "CLOCK_KILLS"
"""Environment variables: the number of the call that kills, and the process that it kills."""
asked = 0


class Clock:
    """Tells the time."""

    def reset(self, **row: object) -> str:
        return str(time.time_ns())[-6:-3]

    def tell(self, what: str) -> str:
        global asked
        asked += 1
        if asked == int(os.environ.get(KILL_AT, "0")):
            os.kill(int(os.environ[TRAINER]), signal.SIGKILL)
        return str(time.time_ns())[-9:-3]

    def get_reward(self) -> float:
        return time.time_ns() % 1000 / 1000


class AsyncClock(Clock):
    """Tells the time at once."""

    async def tell(self, what: str) -> str:
        return super().tell(what)


def agent(base_url: str, prompt: str, **row: object) -> float:
    """Tells the time in its own loop."""
    clock, messages = Clock(), [user(prompt)]
    while (choice := post(base_url, messages))["token_ids"][-1] == CLOSE:
        messages += [choice["message"], user(clock.tell(""))]
    return clock.get_reward()
