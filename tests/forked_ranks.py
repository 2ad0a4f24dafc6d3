"""Runs ranks of jobs as forks of a process that has imported torch: half of what a short job takes is that import.

A program that `ranks.py` starts and speaks with in lines of JSON. To {"script", "arguments", "folder", "environments",
"outputs"} it answers with the process ids of the ranks, and when all of them have ended, with their exit codes. A rank
is a process of a session of its own, with its own environment, and writes to its own file, as if it had been started.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

# What every job imports sooner or later, nothing of Megatron: that reads the machine when it is imported.
import hydra  # noqa: F401
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.export  # noqa: F401


def main() -> None:
    """Serves until its standard input ends."""
    for line in sys.stdin:
        asked = json.loads(line)
        sys.stdout.flush()
        ranks = [
            _fork(asked, environment, output)
            for environment, output in zip(asked["environments"], asked["outputs"], strict=True)
        ]
        print(json.dumps(ranks), flush=True)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]), flush=True)


def _fork(asked: dict[str, Any], environment: dict[str, str], output: str) -> int:
    """Starts a rank, and returns its process id."""
    rank = os.fork()
    if rank == 0:
        _become(asked["script"], asked["arguments"], asked["folder"], environment, output)
    return rank


def _become(script: str, arguments: list[str], folder: str, environment: dict[str, str], output: str) -> NoReturn:
    """Runs the script in a folder as Python does, and ends as it ends."""
    os.setsid()
    os.chdir(folder)
    for number, path, mode in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY | os.O_APPEND)):
        file = os.open(path, mode)
        os.dup2(file, number)
        os.close(file)
    os.dup2(1, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [script, *arguments]
    sys.path[:0] = [str(Path(script).parent), *environment["PYTHONPATH"].split(os.pathsep)]
    code = 1
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.exit(code)


if __name__ == "__main__":
    main()
