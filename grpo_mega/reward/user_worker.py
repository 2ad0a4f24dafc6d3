"""The processes behind `user_functions.py`: the guard, which the rank starts, and its child, the worker.

The worker runs functions of users and may come to any end: it exits, is killed, runs out of memory, never comes back.
The guard runs nothing of theirs. The kernel gives it what the worker's children leave behind, whatever sessions they
have opened for themselves (it is their subreaper), and tells it when the rank has died (its parent-death signal). When
the worker ends, the rank does, or the rank asks for it, the guard kills all that descends from it and leaves with the
worker's exit code; 128 and the signal's number for one that was killed, as shells have it.

Started as `main`, in an interpreter that has imported no torch: a function whose module needs none has a worker of some
20 MB that is there in a tenth of a second.
"""

from __future__ import annotations

import ctypes
import faulthandler
import hashlib
import importlib
import json
import math
import numbers
import os
import pickle
import random
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

END = signal.SIGRTMIN
"""Asks the guard to end everything."""
STACK = signal.SIGUSR2
"""The worker prints where it is; the guard passes it on."""
TO_RANKS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""What schedulers send to all processes of a rank, for the rank to obey; it then ends the worker."""
MOST_CHARACTERS = 4000
"""Of an error and of its traceback, each."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main(rank: int, connection: int) -> None:
    """Guards a worker until it ends, or `rank`, the process that started this one; then nothing is left of either.

    Args:
        rank: Its process id. The thread of it that started this process must live as long as it does (see prctl(2)).
        connection: Descriptor of the worker's end of a socket.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # children of who was told to ignore it cannot be waited for
    _tell_kernel(PR_SET_CHILD_SUBREAPER, 1)
    _tell_kernel(PR_SET_PDEATHSIG, END)
    if os.getppid() != rank:  # it died before the kernel was told
        return
    worker = os.fork()
    if worker == 0:
        _work(connection)
    os.close(connection)
    code = _watch(worker)
    _end_descendants()
    os._exit(code)


def _tell_kernel(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed; user functions need Linux")


def _watch(worker: int) -> int:
    """The worker's exit code, 0 if it is to end before it does; reaps the orphans that this process is given."""
    while (number := signal.sigwait((signal.SIGCHLD, STACK, END))) != END:
        if number == STACK:
            os.kill(worker, STACK)  # not reaped yet, so nobody else has its number
            continue
        pid = -1
        while pid:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == worker:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
    return 0


def _end_descendants() -> None:
    """Kills the children until there is none: those of a child that dies become children of this process."""
    while children := psutil.Process().children():
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        for child in children:
            with suppress(ChildProcessError):
                os.waitpid(child.pid, 0)


def _work(connection: int) -> None:
    """Answers the rank's requests until it closes its end of the socket. Never returns."""
    _tell_kernel(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in TO_RANKS:  # not SIG_IGN and no mask: programs that a function starts would inherit those
        signal.signal(number, lambda *_: None)
    os.register_at_fork(after_in_child=_obey_signals)
    faulthandler.enable()
    faulthandler.register(STACK, all_threads=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    with suppress(OSError):  # when memory runs out, this process is to go, and not the rank
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        _answer(socket.socket(fileno=connection))
    except BaseException:  # a function has closed the socket, or worse
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _obey_signals() -> None:
    """In a fork that a function makes: signals do there what they usually do."""
    for number in TO_RANKS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _answer(rank: socket.socket) -> None:
    """Reads requests, each eight bytes of length and a pickled tuple, and answers each by a line of JSON.

    An answer has the request's number, or else what a function writes into the socket could pass for one.
    """
    requests, me, number = rank.makefile("rb"), os.getpid(), 0
    functions: dict[str, Callable[[Any], Any]] = {}
    while size := requests.read(8):
        number += 1
        answer = {"number": number} | _attempt(functions, requests.read(int.from_bytes(size, "big")))
        if os.getpid() != me:  # a fork of the worker that came back from the function: there is one worker
            os._exit(0)
        rank.sendall(json.dumps(answer).encode() + b"\n")


def _attempt(functions: dict[str, Callable[[Any], Any]], request: bytes) -> dict[str, Any]:
    """What came of a request: a "value", what was "returned" in its place, or what was "raised" and its "traceback"."""
    try:
        what, name, *arguments = pickle.loads(request)
        if what == "import":
            functions[name] = _import(*arguments)
            return {"value": None}
        return _value(functions[name], *arguments)
    except BaseException as error:  # SystemExit and KeyboardInterrupt too
        return {"raised": _words(error), "traceback": _trace(error)}


def _import(path: str) -> Callable[[Any], Any]:
    module, _, attribute = path.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    if not callable(function):
        raise TypeError(f"it is a {type(function).__name__}, not a function")
    return function


def _value(function: Callable[[Any], Any], sample: Any, key: str) -> dict[str, Any]:
    """Calls the function with generators that depend on `key` alone."""
    _seed(key)
    value = function(sample)
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return {"value": float(value)}
    return {"returned": repr(value)[:MOST_CHARACTERS]}


def _seed(key: str) -> None:
    """Seeds Python's generator, and those of numpy and torch where a function's module has imported them."""
    number = int.from_bytes(hashlib.sha256(key.encode(errors="backslashreplace")).digest()[:8], "big")
    random.seed(number)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(number % 2**32)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(number)


def _words(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:MOST_CHARACTERS]
    except Exception:  # it cannot even be printed
        return type(error).__name__


def _trace(error: BaseException) -> str:
    """The frames of the user's code, the innermost last."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__ and "importlib" not in frame.filename]
    return "".join(traceback.format_list(own)).rstrip()[-MOST_CHARACTERS:]
