"""Generates problems of Countdown, TinyZero's task, for experiment=countdown_1b, without downloading a data set.

    python tools/countdown.py data/countdown
    python tools/countdown.py data/countdown --train 320000 --test 1000 --seed 1

Writes train.jsonl and test.jsonl into the folder. No test problem is a training problem, in any order of its numbers.
The same seed gives the same problems. Exit code: 0 done, 2 the files cannot be written.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import islice
from pathlib import Path

from grpo_mega.data.tasks.countdown import problems
from grpo_mega.platform.files import writing_atomic

DONE, BAD_INPUT = 0, 2
FILES = ("test.jsonl", "train.jsonl")
MOST = 500_000
"""Largest number of problems; slightly more distinct ones exist."""


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the files go; created if missing")
    parser.add_argument("--train", type=int, default=51_200, metavar="N", help="training problems (51,200: 200 steps)")
    parser.add_argument("--test", type=int, default=1_000, metavar="N", help="test problems (1,000)")
    parser.add_argument("--seed", type=int, default=0, help="every seed gives different problems (0)")
    options = parser.parse_args(arguments)
    if min(options.train, options.test) < 1 or options.train + options.test > MOST:
        print(f"error: --train and --test: choose 1 or more of each, and {MOST:,} in all at most", file=sys.stderr)
        return BAD_INPUT
    if existing := [name for name in FILES if (options.folder / name).exists()]:
        print(f"error: {options.folder / existing[0]} exists; remove it, or choose another folder", file=sys.stderr)
        return BAD_INPUT
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
        rows = problems(options.seed)
        # Both files take from one sequence of distinct problems. The test problems come first, so that they are the
        # same for any number of training problems.
        for name, count in zip(FILES, (options.test, options.train), strict=True):
            with writing_atomic(options.folder / name) as file:
                file.writelines(json.dumps(row).encode() + b"\n" for row in islice(rows, count))
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    print(f"{options.train:,} training problems and {options.test:,} test problems in {options.folder}")
    return DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
