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


def __getattr__(name):
    if name == "Exits":
        os._exit(7)
    raise AttributeError(name)
