"""An environment whose import waits for a byte from the pipe `WAITS_FOR`."""

import os

from made_environments import Broken

with open(os.environ["WAITS_FOR"], "rb", buffering=0) as pipe:
    pipe.read(1)


class Slow(Broken):
    pass
