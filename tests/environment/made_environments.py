"""Environments of the tests, as a user writes them: without an import of ours."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
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
        self.done, self.reward = False, 0.0

    def tell(self, number: str) -> str:
        """Notes a number."""
        said = super().tell(number)
        self.reward = len(number) / 4
        self.done = len({*self.told}) > 1
        return said


class Once(Counter):
    """Ends with its first call."""

    done = True


class Done(Counter):
    """Has a tool with the name of the attribute that ends an episode."""

    def done(self, number: str) -> str:
        return number


class Paid:
    """Rewards each turn with the number that it is told."""

    def reset(self, **row: object) -> None:
        self.reward = 0.0

    def tell(self, number: str) -> str:
        self.reward = float(number)
        return number


class Fickle(Counter):
    """Begins once in a process."""

    begun = 0

    def reset(self, answer: str, **row: object) -> None:
        Fickle.begun += 1
        if Fickle.begun > 1:
            raise ValueError("no second board")
        super().reset(answer, **row)


class Told(Counter):
    """Tells its secret before the first turn, and in each reply also how long the problem is."""

    def reset(self, answer: str, **row: object) -> str:
        super().reset(answer, **row)
        self.asked = str(row["prompt"])
        return str(self.secret)

    def tell(self, number: str) -> str:
        """Notes a number."""
        return f"{super().tell(number)}{len(self.asked)}"


class Busy:
    """Replies with all that it was told; some words take forever, in Python or in one of its functions."""

    def reset(self, **row: object) -> None:
        self.told = ""

    def tell(self, what: str) -> str:
        """Notes a word."""
        self.told += what
        while what == "loop":
            pass
        if what == "power":
            self.told = str(3**10**9)
        return self.told


class Together:
    """Replies once a call is under way in each of so many processes as the folder `TOGETHER` says in its name."""

    def reset(self, **row: object) -> None:
        pass

    def wait(self, what: str) -> str:
        """Waits."""
        folder = Path(os.environ["TOGETHER"])
        (folder / str(os.getpid())).touch()
        while len([*folder.iterdir()]) < int(folder.name):
            time.sleep(0.01)
        return "all"


class TextEnv:
    """Guess the number between 1 and 8, as a `BaseTextEnv` of skyrl-gym: the first right digit ends it."""

    def __init__(self, env_config: object = None, extras: dict = {}) -> None:  # noqa: B006
        self.secret = int(extras["answer"])

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict]:
        if prompt[0]["content"] == "shout":
            prompt[0]["content"] = "SHOUT"
        return [*prompt, {"role": "user", "content": "one digit"}], {}

    def step(self, action: str) -> dict:
        right = int(action) == self.secret
        seen = [] if right else [{"role": "user", "content": f"not {action}"}]
        return {"observations": seen, "reward": 1.0 if right else -0.25, "done": right, "metadata": {}}


class TextGym:
    """The same as a text environment of gymnasium, whose secret is its seed's: it ends after three guesses."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        self.secret, self.left = random.Random(seed).randint(1, 8), 3
        return "guess", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self.left -= 1
        right = action == str(self.secret)
        return f"not {action}", 1.0 if right else -0.25, right, self.left == 0, {}


class NumberGym(TextGym):
    """Takes numbers."""

    class action_space:
        n = 9

    def step(self, action: int) -> tuple[str, float, bool, bool, dict]:
        return super().step(f"{action:d}")


class Arena:
    """The same as a game of TextArena."""

    def reset(self, num_players: int, seed: int | None = None) -> None:
        assert num_players == 1
        random.seed(seed)
        self.secret, self.seen, self.rewards = random.randint(1, 8), [(-1, "rules", "PROMPT")], None

    def get_observation(self) -> tuple[int, list[tuple[int, str, str]]]:
        seen, self.seen = self.seen, []
        return 0, seen

    def step(self, action: str) -> tuple[bool, dict]:
        self.seen.append((0, action, "PLAYER_ACTION"))
        self.seen.append((-1, f"not {action}", "GAME_MESSAGE"))
        if int(action) == self.secret:
            self.rewards = {0: 0.5}
        return self.rewards is not None, {}

    def close(self) -> tuple[dict | None, dict]:
        return self.rewards, {}


class Waiting(TextGym):
    """Cannot be played by a caller that does not wait."""

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        return super().step(action)


class OfLength(Arena):
    """Needs an argument."""

    def __init__(self, length: int) -> None:
        self.length = length


class Steps:
    """A class of ours whose tool is called as those of other packages."""

    def reset(self, **row: object) -> None:
        pass

    def step(self, number: int) -> str:
        return str(number + 1)


def double(number: int) -> int:
    """Doubles a number."""
    return 2 * number


def join(first: str, second: str = "z") -> str:
    return first + second


def take(how: Literal["up", "down"], most: float | None = None, of: list[str] | None = None) -> str:
    return f"{how} {most} {of}"


def note(text: str, *more: str, **named: str) -> str:
    return text


class Machine:
    """Its machine fails, or its reward is not a number; records which objects were closed."""

    closed: list[str] = []  # noqa: RUF012 (of all objects)

    def reset(self, name: str, **row: object) -> None:
        self.name = name

    def act(self, what: str) -> str:
        if what == "fail":
            raise SystemExit
        self.reward = float(what)
        return what

    def close(self) -> None:
        self.closed.append(self.name)


class Begins:
    """Begins as its problem says."""

    def reset(self, answer: str, **row: object) -> object:
        if answer == "raise":
            raise ValueError("no board")
        if answer == "exit":
            os._exit(3)
        if answer == "hang":
            while True:
                pass
        return {"none": None, "bytes": b"7", "long": "7" * 10**7, "full": "7" * 300, "lone": "\ud800"}.get(
            answer, answer
        )

    def act(self, what: str) -> str:
        return what

    def get_reward(self) -> float:
        return 0.5


class Needs(Begins):
    """Needs a field that few problems have."""

    def reset(self, level: str, *, answer: str, board: str = "", **row: object) -> str:
        return level


class Takes(Begins):
    """Takes few fields."""

    def reset(self, answer: str, prompt: str, id: str) -> None:
        pass


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
        if what == "profile":
            os.kill(os.getpid(), signal.SIGPROF)
        if what == "fork":
            os.fork()
        if what == "print":
            for _ in range(100):
                print("y" * 10**6)
        if what == "wait":
            with open(os.environ["WAITS_FOR"], "rb", buffering=0) as pipe:
                pipe.read(1)
        if what == "hang":
            while True:
                pass
        return {"none": None, "bytes": b"\xff", "nan": float("nan"), "long": "7" * 10**7, "lone": "\ud800"}.get(
            what, what
        )


class Unclosed(Begins):
    """Cannot be closed."""

    def close(self) -> None:
        raise SystemExit


class Mutates:
    """Changes the fields of its problem."""

    def reset(self, board: list[str], **row: object) -> str:
        self.board = board
        return self.say("reset")

    def say(self, what: str) -> str:
        self.board.append(what)
        return "".join(self.board)


class Differs(Broken):
    """Says which rank asks it."""

    def reset(self, **row: object) -> str:
        return os.environ["RANK"]

    def act(self, what: str) -> str:
        return os.environ["RANK"]


class Judge(Broken):
    """Gives the reward that was said last."""

    def get_reward(self) -> object:
        if self.said[-1:] == ["fail"]:
            raise ValueError("no reward")
        while self.said[-1:] == ["loop"]:
            pass
        return {"none": None, "nan": float("nan")}.get(self.said[-1], float(len(self.said)))


def star(*words: str) -> str:
    return " ".join(words)


def by_place(number: int, /) -> int:
    return number
