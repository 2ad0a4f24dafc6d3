"""An environment that only the first rank can import."""

import os

if os.environ["RANK"] != "0":
    raise RuntimeError("the licence server does not answer")


def double(number: int) -> int:
    return 2 * number
