"""What cannot be an environment."""

import os


class Untyped:
    def reset(self, **row):
        pass

    def guess(self, number):
        return number


class Idle:
    def reset(self, **row):
        pass

    def get_reward(self):
        return 1.0


class Static:
    def reset(self, **row):
        pass

    @staticmethod
    def guess(number: int):
        return number


class Shared:
    def reset(self, **row):
        pass

    def guess(self, number: int):
        return number

    @classmethod
    def hint(cls, number: int):
        return number


class Unmade:
    def reset(self, **row):
        pass

    def guess(self, number: int):
        return number

    def __init__(self):
        raise OSError("no licence")


def reset(text: str):
    return text


def get_reward(text: str):
    return text


def unknown(text: "Missing"):  # noqa: F821
    return text


def generating(base_url, **row):
    yield 1.0


async def generating_at_once(base_url, **row):
    yield 1.0


def unnamed(base_url, prompt, /, **row):
    return 1.0


class Search:
    """No agent, whatever its parameter is called."""

    def __init__(self, base_url="http://search.internal"):
        self.found = base_url

    def reset(self, **row):
        pass

    def search(self, query: str):
        return self.found


def __getattr__(name):
    if name == "Exits":
        os._exit(7)
    raise AttributeError(name)
