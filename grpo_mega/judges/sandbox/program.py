"""Last step of a contained fork: it becomes a command, or runs a Python program.

It runs inside the box: only the standard library, and no other file of this project.
"""

from __future__ import annotations

import atexit
import gc
import io
import json
import os
import random
import signal
import site
import sys
import threading
import traceback
import types
from contextlib import suppress
from typing import Any, NoReturn

RESULT = 3
"""Descriptor for a called function's result."""
CANNOT_RUN = 127
"""Exit code for a command that does not exist, as in shells."""
TO_RANKS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that schedulers send to all processes of a rank: the rank reacts, and no program's reward may change."""


def become(argv: list[str]) -> NoReturn:
    """Replaces this process by a command; exits with `CANNOT_RUN` and a message when there is none."""
    # Python ignores the first two, and nohup, if the rank was started with it, the third. Ignored signals stay ignored
    # across exec, but programs expect the default.
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"cannot run {argv[0]}: {error.strerror}\n".encode())
    os._exit(CANNOT_RUN)


def run_python(request: dict[str, Any]) -> int:
    """Runs the source, as `__main__` unless one of its functions is called; returns an interpreter's exit code."""
    module = types.ModuleType("program" if request["call"] else "__main__")
    module.__file__ = os.path.abspath("program.py")
    sys.modules[module.__name__] = module
    sys.argv = ["program.py"]
    # An interpreter started without `site` lacks exit() and quit().
    site.setquit()
    # Python's limit on digits guards against slow conversions; here CPU time is limited. Python before 3.10.7 has no
    # limit.
    with suppress(AttributeError):
        sys.set_int_max_str_digits(0)
    if request["files"]:
        sys.path.insert(0, os.getcwd())
    # SIGHUP is ignored where the rank was started with nohup.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Processes that the program forks get default handlers. The signals are blocked during the fork, so that none
    # arrives in a child that still has the box's handlers.
    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, TO_RANKS),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, TO_RANKS),
        after_in_child=_restore_signals,
    )
    # Python reseeds `random` in a fork; with a fixed seed, the same program gets the same reward.
    random.seed(0)
    streams = [open(number, "w" if number else "r", encoding="utf-8", closefd=False) for number in range(3)]  # noqa: SIM115
    sys.stdin, sys.stdout, sys.stderr = streams
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = streams  # type: ignore[misc]
    code = 0
    try:
        imports, *called = request["call"] or [""]
        exec(imports, module.__dict__)
        exec(compile(request["source"], "program.py", "exec", dont_inherit=True), module.__dict__)
        if called:
            _call(module, *called)
    except SystemExit as error:
        if isinstance(error.code, int):
            code = error.code & 0xFF
        elif error.code is not None:
            code = 1
            with suppress(BaseException):
                print(error.code, file=sys.stderr)
    # KeyboardInterrupt and the like end an interpreter with a traceback too.
    except BaseException:
        code = 1
        with suppress(BaseException):
            traceback.print_exc(limit=-20)
    ended = _end(module)
    return code or ended


def _end(module: types.ModuleType) -> int:
    """Ends the program as an interpreter does, so that everything written to a file object reaches its file.

    Threads are waited for, `atexit` is called, streams are flushed, and files that only variables hold are closed.
    Returns the exit code: 120 when standard output or error cannot be written, as an interpreter does.
    """
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with suppress(BaseException):
        atexit._run_exitfuncs()
    code = _flush()
    # The collector closes the layers of a file that is part of a cycle in any order, which may lose buffered text.
    with suppress(BaseException):
        for one in gc.get_objects():
            if type(one) in (io.TextIOWrapper, io.BufferedWriter) and not one.closed:
                one.flush()
    with suppress(BaseException):
        # One after the other, as an interpreter does: a finalizer may use objects that come later.
        for name in [name for name in module.__dict__ if name != "__builtins__"]:
            module.__dict__[name] = None
        gc.collect()
    return code or _flush()


def _flush() -> int:
    """Flushes the standard streams; returns 0, or 120 when that failed."""
    code = 0
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except BaseException:
            code = 120
    return code


def _restore_signals() -> None:
    """Restores default signal handling in processes that a program forks, before any signal is delivered."""
    for number in TO_RANKS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TO_RANKS)


def _call(module: types.ModuleType, name: str, arguments: list[Any]) -> None:
    """Calls a function of the module, or `Class.method`; writes its return value as JSON."""
    function: Any = module
    for part in name.split("."):
        function = getattr(function() if isinstance(function, type) else function, part)
    # Only plain data leaves the box: an object whose `__eq__` is always true would equal every expected result.
    data = json.dumps(function(*arguments), allow_nan=False).encode()
    while data:
        data = data[os.write(RESULT, data) :]
