"""Runs Python programs as forks of a process that has imported torch: most of what a short one takes is that import.

A program that `forks.py` starts and speaks with in lines of JSON. To a list of {"words", "folder", "environment",
"output", "errors"} it answers with the process ids, and when all of them have ended, with their exit codes. Each is a
process of a session of its own, with its own environment, and writes to its own files, as if it had been started. But
what torch and the other modules below read of the environment as they are imported, they have read before. Nor
does the interpreter take itself down at their end: what goes wrong there, tests see that start processes of their own.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import site
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, NoReturn

# What most programs import sooner or later, nothing of Megatron: that reads the machine when it is imported. The first
# optimizer of a process imports torch's compiler, which takes a second.
import hydra  # noqa: F401
import psutil  # noqa: F401
import rich.console  # noqa: F401
import torch._dynamo
import torch.distributed._tensor
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.export
import torch.utils.cpp_extension
import torch.utils.tensorboard
from transformers import AutoTokenizer  # noqa: F401


def main() -> None:
    """Serves until its standard input ends."""
    for line in sys.stdin:
        sys.stdout.flush()
        forks = [_fork(**asked) for asked in json.loads(line)]
        print(json.dumps(forks), flush=True)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) for fork in forks]), flush=True)


def _fork(**asked: Any) -> int:
    """Starts a program, and returns its process id."""
    fork = os.fork()
    if fork == 0:
        _become(**asked)
    return fork


def _become(words: list[str], folder: str, environment: dict[str, str], output: str, errors: str) -> NoReturn:
    """Runs `python WORDS`, a script or -m and a module, in a folder, and ends as it ends."""
    os.setsid()
    os.chdir(folder)
    for number, path, mode in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY), (2, errors, os.O_WRONLY)):
        file = os.open(path, mode | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    if torch.cuda._is_in_bad_fork():
        # A module above has asked CUDA for its devices, as torch.utils.cpp_extension does where there is a toolkit: no
        # fork can use them any more.
        os.execve(sys.executable, [sys.executable, *words], environment)
    os.environ.clear()
    os.environ.update(environment)
    module = words[0] == "-m"
    sys.argv = words[module:]
    sys.path[:0] = [folder if module else str(Path(words[0]).parent), *environment["PYTHONPATH"].split(os.pathsep)]
    sys.modules.pop("sitecustomize", None)
    site.execsitecustomize()
    code = 1
    try:
        if module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        # As forks of multiprocessing end: Python would take a second to take down all that is imported here.
        threading._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if not stream.closed:
                stream.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
