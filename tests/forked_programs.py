"""Runs Python programs as forks of a process that has imported torch, Megatron and the product: most of what a short
program takes is importing them.

A program that `forks.py` starts and speaks with over a socket, in lines of JSON. To the fields of a `forks.Program` it
answers {"started": process id}, and when the program has ended, {"ended": process id, "code": exit code}. Each is a
process in
a session of its own, with its own environment, and writes to its own files, as if it had been started. But what the
modules below read of the environment as they are imported, they have read before. Nor does the interpreter take
itself down at the end: what goes wrong there, tests see that start processes of their own.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import site
import socket
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

# The first optimizer of a process imports torch's compiler, which takes a second.
import matplotlib.backends.backend_agg  # noqa: F401
import torch._dynamo
import torch.distributed.fsdp
import torch.export
import torch.utils.cpp_extension
import torch.utils.tensorboard
from transformers import AutoTokenizer  # noqa: F401

REPOSITORY = Path(__file__).resolve().parents[1]


def warm_up() -> None:
    """Imports Megatron and the product, as the programs will that run here, and does once what is slow at first."""
    sys.path[:0] = paths = [str(REPOSITORY), str(REPOSITORY / "kernels"), str(REPOSITORY / "tests")]
    from composed import composed

    from grpo_mega import platform
    from grpo_mega.show.plot import plot_curves

    platform.start()
    shown = ("forecast.dry_run.completions", "forecast.planning.show", "show.evaluation", "show.report.page")
    for module in ("assemble", "convert", "train", *shown):
        importlib.import_module(f"grpo_mega.{module}")
    composed("experiment=tiny")
    with TemporaryDirectory() as folder:
        plot_curves([], Path(folder, "curves.png"), "")
    del sys.path[: len(paths)]
    gc.collect()
    gc.freeze()  # collections in forks need not look at, and copy, what was imported
    gc.set_threshold(100_000)


def main() -> NoReturn:
    """Serves whoever connects, until its standard input ends."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    if not torch.cuda.is_available():  # otherwise no fork could use the GPU
        warm_up()
    events = selectors.DefaultSelector()
    events.register(sys.stdin, selectors.EVENT_READ)
    events.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in events.select():
            if key.fileobj is sys.stdin:
                os._exit(0)  # as forks end, below
            if key.fileobj is listener:
                asking = listener.accept()[0].makefile("rwb", buffering=0)
                events.register(asking, selectors.EVENT_READ)
            elif key.data is None:
                _answer(key.fileobj, events)
            else:
                events.unregister(key.fileobj)
                os.close(key.fd)
                program, asking = key.data
                code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
                _say(asking, {"ended": program, "code": code})


def _answer(asking: Any, events: selectors.BaseSelector) -> None:
    """Starts the program that is asked for; or lets go of who has gone."""
    line = asking.readline()
    if not line:
        events.unregister(asking)
        asking.close()
        return
    fork = os.fork()
    if fork == 0:
        for key in events.get_map().values():
            if key.fileobj is not sys.stdin:
                os.close(key.fd)
        _become(**json.loads(line))
    events.register(os.pidfd_open(fork), selectors.EVENT_READ, (fork, asking))
    _say(asking, {"started": fork})


def _say(asking: Any, what: dict[str, int]) -> None:
    with contextlib.suppress(OSError, ValueError):  # it has gone
        asking.write(json.dumps(what).encode() + b"\n")


def _become(
    words: list[str], folder: str, environment: dict[str, str], output: str, errors: str, cold: bool
) -> NoReturn:
    """Runs `python WORDS`, a script or -m and a module, in a folder, and ends as it ends."""
    os.setsid()
    os.chdir(folder)
    for number, path, mode in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY), (2, errors, os.O_WRONLY)):
        file = os.open(path, mode | os.O_APPEND | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    module = words[0] == "-m"
    first = folder if module else str(Path(words[0]).parent)
    paths = environment["PYTHONPATH"].split(os.pathsep)
    if cold or torch.cuda._is_in_bad_fork():  # no fork can use CUDA after its parent has
        os.execve(sys.executable, [sys.executable, *words], environment)
    homes = [path for path in (first, *paths) if Path(path, "grpo_mega", "__init__.py").exists()]
    if homes and not REPOSITORY.samefile(homes[0]):  # another copy of the product than is imported here
        for name in [name for name in sys.modules if name.startswith(("grpo_mega", "grpo_kernels"))]:
            del sys.modules[name]
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = words[module:]
    sys.path[:0] = paths
    sys.modules.pop("sitecustomize", None)
    site.execsitecustomize()
    sys.path.insert(0, first)  # Python, too, adds it when that has run
    code = 1
    try:
        if module:
            sys.modules.pop(words[1], None)  # it runs once more, as __main__
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
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
