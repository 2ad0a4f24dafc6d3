"""Main process of a box: forks a fresh process for every program, and kills it with everything that it started.

It is started once and imports Python's usual modules, so that a program costs a fork instead of an interpreter. With
namespaces ("bubblewrap") it is process 1 of a box that has no network and none of the machine's files, and every
program gets two more namespaces: for processes, which the kernel ends together, and for an empty /tmp. Without
namespaces ("landlock") a program is a process group that it cannot leave, and may write no file; a guard above this
process then kills what a program has started if this process and its owner die at once.

A request comes over a socket as a message with descriptors: the request itself (a pickled dict, in memory), and the
program's standard input, output and error. The answer is one message, sent once no process of the program is alive.
While a program runs, any message means: kill it now. The program itself has none of these descriptors.

Every program inherits this process' memory. So this process reads nothing of a request, not even a file's name: only
the fork that becomes the program reads it.

It runs inside the box: only the standard library, and the files of this project that `box.py` sends along.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import json
import os
import pickle
import resource
import select
import shutil
import signal
import socket
from contextlib import nullcontext, suppress
from typing import Any, NoReturn

from grpo_mega.judges.sandbox import guard, landlock, program, seccomp
from grpo_mega.judges.sandbox.program import TO_RANKS

WARM = (
    "__future__ abc array bisect cmath collections.abc copy dataclasses datetime decimal enum fractions functools "
    "heapq io itertools math operator queue random re statistics string textwrap time typing"
)
"""Modules that programs often import, imported in advance."""
CLONE_NEWNS, CLONE_NEWPID = 0x20000, 0x20000000
MS_NOSUID, MS_NODEV, MS_BIND = 2, 4, 4096
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, PR_SET_DUMPABLE = 47, 4, 4
CAPABILITIES_3 = 0x20080522
RUN, RUN_WITH_FILES = b"run", b"run with files"
"""Messages that announce a request."""
REPORT = 4
"""Descriptor on which a program's process reports that it could not start."""
_C = ctypes.CDLL(None, use_errno=True)


def main(control_fd: int, owner_fd: int, mechanism: str, read_only: list[str]) -> NoReturn:
    """Serves programs until the process that started this one closes its end of the socket, or dies.

    Args:
        control_fd: This process's end of the socket.
        owner_fd: A pidfd of the process that started the box; its end is noticed even if its forks keep the socket
            open.
        mechanism: "bubblewrap", "landlock" or "unconfined".
        read_only: Files and folders that programs may read, for Landlock.
    """
    # Handlers that do nothing, not SIG_IGN: an ignored signal would stay ignored in the commands that programs become.
    for number in TO_RANKS:
        signal.signal(number, lambda *_: None)
    # Holds the files that a program begins with.
    folder = f"/tmp/sandbox-{os.urandom(8).hex()}"
    if mechanism != "bubblewrap":
        guard.under_guard(owner_fd, folder)
    guard.adopt_orphans()
    for name in WARM.split():
        importlib.import_module(name)
    # Frozen objects are never traversed, so the collector of a fork does not copy the pages that it shares with the
    # box.
    gc.collect()
    gc.freeze()
    control = socket.socket(fileno=control_fd)
    own = _C.syscall(guard.PIDFD_OPEN, os.getpid(), 0) if mechanism == "bubblewrap" else -1
    control.send(b"ready")
    ended = select.poll()
    ended.register(control, select.POLLIN)
    ended.register(owner_fd, select.POLLIN)
    while True:
        if any(descriptor == owner_fd for descriptor, _ in ended.poll()):
            os._exit(0)
        message, descriptors, _, _ = socket.recv_fds(control, 16, 8)
        if not message:
            os._exit(0)
        if message in (RUN, RUN_WITH_FILES):
            of_program = folder if message == RUN_WITH_FILES and mechanism != "bubblewrap" else None
            control.send(_serve(descriptors, control, owner_fd, mechanism, read_only, own, of_program))


def _serve(
    descriptors: list[int],
    control: socket.socket,
    owner: int,
    mechanism: str,
    read_only: list[str],
    own: int,
    folder: str | None,
) -> bytes:
    """Runs one program; returns JSON: its wait "status" (null if unknown), or the "error" of its start."""
    reader, writer = os.pipe()
    started = (descriptors, writer)
    with open(reader, "rb") as reports:
        try:
            if mechanism == "bubblewrap":
                # Only the fork is in a new process namespace; the box stays in `own`.
                _check(_C.unshare(CLONE_NEWPID), "unshare(CLONE_NEWPID)")
                try:
                    child = _fork(_as_first_process, started)
                finally:
                    _check(_C.setns(own, CLONE_NEWPID), "setns")
            else:
                if folder:
                    os.mkdir(folder, 0o700)
                child = _fork(_in_group, started, mechanism, read_only, folder)
                # Both sides set the group, as either may run first and `_until_ended` kills by group. A fork that was
                # faster and already runs its command may not be moved any more.
                with suppress(PermissionError):
                    os.setpgid(child, child)
        except OSError as error:
            return json.dumps({"error": str(error)}).encode()
        finally:
            for descriptor in (*descriptors, writer):
                os.close(descriptor)
        status: int | None = _until_ended(child, control, owner, in_group=mechanism != "bubblewrap")
        report = reports.read()
    if folder:
        # A fork removes the folder: the box itself must not read file names, which later programs would inherit.
        os.waitpid(_fork(shutil.rmtree, folder, True), 0)
    if mechanism == "bubblewrap":
        report, _, ended = report.rpartition(b"\x00")
        status = int(ended) if ended else None
    return json.dumps({"error": report.decode(errors="replace")} if report else {"status": status}).encode()


def _fork(then: Any, *arguments: Any) -> int:
    """Process id of a fork that calls `then` and exits."""
    child = os.fork()
    if child == 0:
        try:
            then(*arguments)
        finally:
            os._exit(1)
    return child


def _until_ended(child: int, control: socket.socket, owner: int, in_group: bool) -> int:
    """Waits for the program; kills it and all it started when it ends or a message arrives; returns its wait status."""
    ended = _C.syscall(guard.PIDFD_OPEN, child, 0)
    waiting = select.poll()
    for descriptor in (ended, control.fileno(), owner):
        waiting.register(descriptor, select.POLLIN)
    ready = [descriptor for descriptor, _ in waiting.poll()]
    os.close(ended)
    # The child has not been reaped yet, so its number cannot belong to another process. A signal to a group cannot miss
    # a process that is being forked.
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL) if in_group else os.kill(child, signal.SIGKILL)
    # Waits for every process, not only for `child`: the answer promises that none of the program's processes is alive.
    status = 0
    while True:
        try:
            reaped, one = os.waitpid(-1, 0)
        except ChildProcessError:
            break
        status = one if reaped == child else status
    if owner in ready or (control.fileno() in ready and not control.recv(16)):
        os._exit(0)
    return status


def _read(descriptor: int) -> dict[str, Any]:
    """Reads the request; only a fork may call it (see the module's docstring)."""
    with open(descriptor, "rb") as file:
        return pickle.load(file)


def _write(files: dict[str, bytes], folder: str) -> None:
    for name, content in files.items():
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)
        os.chmod(path, 0o755)


def _as_first_process(started: tuple[list[int], int]) -> NoReturn:
    """Process 1 of the program's own namespaces: the program is its child, and all processes end with it."""
    (given, *descriptors), report = started
    try:
        request = _read(given)
        _check(_C.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "PR_SET_DUMPABLE")
        _check(_C.unshare(CLONE_NEWNS), "unshare(CLONE_NEWNS)")
        room = f"size={request['tmp_bytes']},nr_inodes={request['tmp_files'] + 1},mode=700"
        flags = MS_NOSUID | MS_NODEV
        _check(_C.mount(b"tmpfs", b"/tmp", b"tmpfs", flags, room.encode()), "mounting /tmp")
        # One file system under both names, so that one limit covers what the program writes to either.
        _check(_C.mount(b"/tmp", b"/dev/shm", None, MS_BIND, None), "mounting /dev/shm")
        _write(request["files"], "/tmp")
        child = _fork(_program, request, descriptors, report, "bubblewrap", [], "/tmp")
        os.closerange(0, report)
        os.closerange(report + 1, 1024)
        # As process 1 it also inherits and reaps the program's orphans. When it exits, the kernel kills all that is
        # left.
        while True:
            reaped, status = os.waitpid(-1, 0)
            if reaped == child:
                os.write(report, b"\x00%d" % status)
                os._exit(0)
    except Exception as error:
        os.write(report, f"{error}\x00".encode())
        os._exit(1)


def _in_group(started: tuple[list[int], int], mechanism: str, read_only: list[str], folder: str | None) -> NoReturn:
    """Runs a program without namespaces: a process group, whose orphans the kernel makes children of the box."""
    (given, *descriptors), report = started
    os.setpgid(0, 0)
    try:
        request = _read(given)
        if folder:
            _write(request["files"], folder)
    except Exception as error:
        os.write(report, str(error).encode() or type(error).__name__.encode())
        os._exit(1)
    _program(request, descriptors, report, mechanism, [*read_only, *([folder] if folder else [])], folder or "/")


def _program(
    request: dict[str, Any], descriptors: list[int], report: int, mechanism: str, read_only: list[str], folder: str
) -> NoReturn:
    """Gives up everything but the program's own descriptors and rights, and becomes the program."""
    try:
        guard.tell_kernel(guard.PR_SET_PDEATHSIG, signal.SIGKILL)
        _only(descriptors, report)
        os.chdir(folder)
        _limit(request)
        if mechanism == "bubblewrap":
            # Drops the capabilities that the box needs for mounts and namespaces (capset(2)).
            _check(_C.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "PR_CAP_AMBIENT")
            header = (ctypes.c_uint32 * 2)(CAPABILITIES_3, 0)
            none = (ctypes.c_uint32 * 6)()
            _check(_C.capset(header, none), "capset")
        elif mechanism == "landlock":
            landlock.restrict(read_only)
        with suppress(OSError) if mechanism == "unconfined" else nullcontext():
            seccomp.install(namespaces=mechanism == "bubblewrap")
    except Exception as error:
        os.write(REPORT, str(error).encode() or type(error).__name__.encode())
        os._exit(1)
    if request["argv"]:
        program.become(request["argv"])
    os.close(REPORT)
    os._exit(program.run_python(request))


def _only(descriptors: list[int], report: int) -> None:
    """Moves the program's descriptors to 0, 1, 2 (and 3 for a result) and `REPORT`, and closes all others."""
    # Moved above 64 first, as one of them may already have a number that another one must get.
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 64) for descriptor in (*descriptors, report)]
    numbers = [*range(len(descriptors)), REPORT]
    os.closerange(0, 64)
    for descriptor, number in zip(above, numbers, strict=True):
        os.dup2(descriptor, number)
    # Closes `REPORT` when the program becomes a command; an empty report tells the box that the start succeeded.
    os.set_inheritable(REPORT, False)
    os.closerange(REPORT + 1, max(1024, *above) + 1)


def _limit(request: dict[str, Any]) -> None:
    seconds = request["cpu_seconds"]
    for kind, soft, hard in (
        # The soft limit sends SIGXCPU, which `watch` reports as "time"; the hard one kills a program that catches it.
        (resource.RLIMIT_CPU, seconds, seconds + 1),
        (resource.RLIMIT_AS, request["memory_bytes"], request["memory_bytes"]),
        (resource.RLIMIT_FSIZE, request["file_bytes"], request["file_bytes"]),
        (resource.RLIMIT_NOFILE, request["open_files"], request["open_files"]),
        (resource.RLIMIT_NPROC, request["processes"], request["processes"]),
        # With 0 the kernel would still start a collector of core dumps (core(5)).
        (resource.RLIMIT_CORE, 1, 1),
    ):
        most = resource.getrlimit(kind)[1]
        soft, hard = (value if most == resource.RLIM_INFINITY else min(value, most) for value in (soft, hard))
        resource.setrlimit(kind, (soft, hard))


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
