"""Processes of `user_functions.py`: the guard, which the rank starts, and its child, the worker.

The worker runs users' functions and may end in any way: it exits, is killed, runs out of memory, never returns. The
guard (of `judges/sandbox`) runs none of their code. When the worker or the rank ends, or the rank asks for it, the
guard kills all its descendants and exits with the worker's exit code; 128 plus the signal's number for a worker that
was killed, as shells do.

Started as `main`, in an interpreter that has imported no torch: a function whose module needs none has a worker of some
20 MB that starts in a tenth of a second.
"""

from __future__ import annotations

import asyncio
import faulthandler
import hashlib
import importlib
import inspect
import json
import os
import pickle
import random
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from grpo_mega.errors import InputError, meant
from grpo_mega.judges.sandbox import guard
from grpo_mega.reward.verdict import MOST_CHARACTERS, NoVerdict, read_verdict, shown

Result = TypeVar("Result")

OURS = f"{Path(__file__).parents[1]}{os.sep}"
"""Directory of the code that is not the user's."""
STACK = signal.SIGUSR2
"""Signal on which the worker prints its stack; the guard forwards it."""
TO_RANKS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that schedulers send to all processes of a rank: the rank reacts to them, and ends the worker itself."""
ONE, AT_ONCE, LIST = "one", "at once", "list"
"""Ways in which a function takes samples."""
MOST_AT_ONCE = 64
"""Number of calls of async functions that run concurrently."""
SERVE = b"serve"
"""Request to answer those that follow, (function, arguments, seconds), as they are done, until an empty one."""
SLICE = 0.1
"""Seconds of one wait for a call."""
SECONDS_TO_END = 2.0
"""Seconds that a call has to end after its time limit."""
LOOP = asyncio.Runner()
"""One event loop for all calls, so that objects bound to a loop, such as client sessions, can be reused."""


def main(rank: int, connection: int) -> None:
    """Guards a worker until it or the process `rank`, which started this one, ends; then kills all its descendants.

    Args:
        rank: Process id of the rank. Its thread that started this process must live as long as the rank (prctl(2)).
        connection: Descriptor of the worker's end of a socket.
    """
    if not guard.take_charge(rank):
        return
    # The guard never runs a function itself, so a function that crashes or hangs does not take the guard with it.
    worker = os.fork()
    if worker == 0:
        _work(connection)
    os.close(connection)
    code = guard.watch(worker, passed_on=(STACK,))
    guard.end_descendants()
    os._exit(code)


def _work(connection: int) -> None:
    """Answers the rank's requests until the rank closes its end of the socket. Never returns."""
    guard.tell_kernel(guard.PR_SET_PDEATHSIG, signal.SIGKILL)
    # Handlers that do nothing, not SIG_IGN or a mask: programs started by a function would inherit those.
    for number in TO_RANKS:
        signal.signal(number, lambda *_: None)
    os.register_at_fork(after_in_child=_restore_signals)
    faulthandler.enable()
    faulthandler.register(STACK, all_threads=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    # When memory runs out, the kernel should kill this process, not the rank.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        _answer(socket.socket(fileno=connection))
    # The rank has closed its end.
    except ConnectionError:
        os._exit(0)
    # A function may have closed the socket, or worse.
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _restore_signals() -> None:
    """Restores default signal handling in processes that a function forks."""
    for number in TO_RANKS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _answer(rank: socket.socket) -> None:
    """Reads requests (eight bytes of length, then a pickled tuple) and answers each with a line of JSON.

    An answer carries its request's number, so that text which a function writes into the socket cannot pass for one.
    """
    requests, me, number = rank.makefile("rb"), os.getpid(), 0
    functions: dict[str, Function] = {}
    while (request := _next(requests)) is not None:
        number += 1
        if request == SERVE:
            number, answer = LOOP.run(_serve(functions, requests, number, rank)), {}
        else:
            answer = _attempt(functions, request)
        # In a fork that the function made, the function returns as well, but only the worker itself may answer.
        if os.getpid() != me:
            os._exit(0)
        _send(rank, number, answer)


def _next(requests: BinaryIO) -> bytes | None:
    """The next request; None at the end."""
    size = requests.read(8)
    return requests.read(int.from_bytes(size, "big")) if size else None


def _send(rank: socket.socket, number: int, answer: dict[str, Any]) -> None:
    rank.sendall(json.dumps({"number": number} | answer).encode() + b"\n")


async def _serve(functions: dict[str, Function], requests: BinaryIO, number: int, rank: socket.socket) -> int:
    """Serves, see `SERVE`; returns the number of the empty request, the last one that was read."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Queue[bytes | None]()

    def read() -> None:
        # Also while a call blocks the loop, so that the rank can always send.
        while request := _next(requests):
            loop.call_soon_threadsafe(arrived.put_nowait, request)
        loop.call_soon_threadsafe(arrived.put_nowait, None)

    async def answer(number: int, request: bytes) -> None:
        try:
            name, arguments, seconds = pickle.loads(request)
            _send(rank, number, await _awaited(_value(functions[name], arguments), seconds))
        # A call has cancelled what is not its own: the rank will ask the others again.
        except BaseException:
            os._exit(1)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    async with asyncio.TaskGroup() as answers:
        while request := await arrived.get():
            number += 1
            answers.create_task(answer(number, request))
    reader.join()
    return number + 1


@dataclass(frozen=True)
class Function:
    """A user function and how to call it.

    Attributes:
        call: The function itself.
        form: How the function takes samples: `ONE` at a time, several `AT_ONCE` (async), or as a `LIST`.
        options: Further arguments.
    """

    call: Callable[..., Any]
    form: str
    options: dict[str, Any]


def _attempt(functions: dict[str, Function], request: bytes) -> dict[str, Any]:
    """Answer to a request, or the error "raised" with its "traceback".

    The answer to an import is how the function takes samples; to a call, "outcomes", one for each sample (see `_read`);
    to a request for a value, that "value".
    """
    try:
        what, name, *arguments = pickle.loads(request)
        if what == "import":
            function = functions[name] = _import(*arguments)
            return {"form": function.form}
        if what == "value":
            return without_loop(_value(functions[name], arguments))
        return {"outcomes": _outcomes(functions[name], *arguments)}
    # A function that raises SystemExit or KeyboardInterrupt must not end the worker.
    except BaseException as error:
        return _failed(error)


async def _value(function: Function, arguments: Sequence[Any]) -> dict[str, Any]:
    value = function.call(*arguments, **function.options)
    if inspect.isawaitable(value):
        value = await value
    # Refused here, where it is the function's fault, and not when the answer is sent.
    json.dumps(value)
    return {"value": value}


def without_loop(work: Coroutine[Any, Any, Result]) -> Result:
    """The result of a coroutine that never waits. In an event loop, what it calls could not use `asyncio.run`."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise RuntimeError("it waits, but is not declared as `async def`")


def _failed(error: BaseException) -> dict[str, Any]:
    """The error "raised", the "traceback" of the user's code, innermost frame last, and an InputError's "input"."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(OURS) and "importlib" not in frame.filename]
    try:
        text = f"{type(error).__name__}: {error}"[:MOST_CHARACTERS]
    # An exception's own `__str__` may fail.
    except Exception:
        text = type(error).__name__
    refused = {"input": error.args} if type(error) is InputError else {}
    return refused | {"raised": text, "traceback": "".join(traceback.format_list(own)).rstrip()[-MOST_CHARACTERS:]}


def _import(path: str, options: dict[str, Any]) -> Function:
    module, _, attribute = path.partition(":")
    imported = importlib.import_module(module)
    try:
        function = getattr(imported, attribute)
    except AttributeError as error:
        known = [name for name, value in vars(imported).items() if callable(value)]
        raise AttributeError(f"{error}{meant(attribute, known)}") from None
    if not callable(function):
        raise TypeError(f"it is a {type(function).__name__}, not a function")
    is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    try:
        first = next(iter(inspect.signature(function).parameters), "")
    # Functions of extension modules may have no signature.
    except (TypeError, ValueError):
        first = ""
    form = LIST if first == "samples" else AT_ONCE if is_async else ONE
    return Function(function, form, options)


def _outcomes(function: Function, samples: list[Any], keys: list[str], seconds: float) -> list[dict[str, Any]]:
    """Outcome of the function for each sample; `keys`, one per sample, seed the random generators."""
    _check_parameters(function)
    # Seeded before every call, so that a score does not depend on which samples the worker scored before.
    seed_all("\n".join(keys))
    if function.form == AT_ONCE:
        return LOOP.run(_at_once(function, samples, seconds))
    if function.form == ONE:
        return [_read(function.call(sample, **function.options)) for sample in samples]
    returned = function.call(samples, **function.options)
    if inspect.iscoroutine(returned):
        returned = LOOP.run(returned)
    if not isinstance(returned, (list, tuple)) or len(returned) != len(samples):
        raise NoVerdict(f"returned {shown(returned)} for a list of {len(samples)} samples; return one of each")
    return [_read(value) for value in returned]


def _check_parameters(function: Function) -> None:
    """Raises TypeError, with what a reward function is called with, if this one does not take that."""
    try:
        # A decorator may take other arguments than what it wraps.
        signature = inspect.signature(function.call, follow_wrapped=False)
    # Functions of extension modules may have no signature.
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, **function.options)
    except TypeError as error:
        given = "a list of samples" if function.form == LIST else "one argument, the sample"
        raise TypeError(f"{error}; it is called with {given}, and with its options by name") from None


async def _at_once(function: Function, samples: list[Any], seconds: float) -> list[dict[str, Any]]:
    """Outcomes of an async function for each sample, `MOST_AT_ONCE` concurrently."""
    gate = asyncio.Semaphore(MOST_AT_ONCE)

    async def score(sample: Any) -> dict[str, Any]:
        return _read(await function.call(sample, **function.options))

    async def in_turn(sample: Any) -> dict[str, Any]:
        async with gate:
            return await _awaited(score(sample), seconds)

    return await asyncio.gather(*map(in_turn, samples))


async def _awaited(work: Coroutine[Any, Any, dict[str, Any]], seconds: float) -> dict[str, Any]:
    """What a call comes to within its time limit, or that it was "late", or how it failed."""
    me = os.getpid()

    async def caught() -> dict[str, Any]:
        try:
            return await work
        # SystemExit would end the loop, and with it the other calls.
        except BaseException as error:
            return _failed(error)
        finally:
            # A fork of the worker shares its event loop, and would go on with the other calls.
            if os.getpid() != me:
                os._exit(0)

    loop, call, left = asyncio.get_running_loop(), asyncio.ensure_future(caught()), seconds
    while not call.done() and left > 0:
        before = loop.time()
        await asyncio.wait({call}, timeout=min(left, SLICE))
        # A longer wait means that another call has kept the loop busy.
        left -= min(loop.time() - before, SLICE)
    if call.done():
        return call.result()
    call.cancel()
    # One that does not end is left behind.
    await asyncio.wait({call}, timeout=SECONDS_TO_END)
    return {"late": True}


def _read(returned: Any) -> dict[str, Any]:
    """Fields of a verdict, or the value that was "returned" instead."""
    try:
        return asdict(read_verdict(returned))
    except NoVerdict as error:
        return {"returned": str(error)}


def seed_all(key: str) -> None:
    """Seeds Python's generator, and those of numpy and torch if they are imported."""
    number = int.from_bytes(hashlib.sha256(key.encode(errors="backslashreplace")).digest()[:8], "big")
    random.seed(number)
    # Modules that the function has not imported need no seed, and importing torch here would cost seconds and memory.
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(number % 2**32)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(number)
