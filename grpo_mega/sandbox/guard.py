"""Guards a process: when it ends, or whoever asked for the guard does, all that it has started ends with it.

A guard is the subreaper of its descendants, so that the kernel makes orphans among them its children, whatever sessions
they have opened, and the parent-death signal tells it when its parent has ended.

    python guard.py PARENT PROGRAM ARGUMENTS...

runs one program this way. When the program ends, when PARENT, a process id, ends or asks for it by `END`, all that the
program has started is killed, and the guard exits with the program's exit code; 128 plus the signal's number for one
that was killed, as shells do, and 127 for one that cannot be started.

Only the standard library is imported: every call of a program waits for it, and boxes have no other.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from contextlib import suppress

END = signal.SIGRTMIN
"""Signal that asks a guard to end everything."""
NOT_STARTED = 127
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PIDFD_OPEN = 434


def main(parent: int, program: list[str]) -> int:
    """Runs the program until it or `parent` ends; returns the exit code."""
    if not take_charge(parent):
        return 0
    try:
        child = os.posix_spawnp(program[0], program, os.environ, setsigmask=[])
    except OSError as error:
        print(f"{program[0]}: {error.strerror}", file=sys.stderr)
        return NOT_STARTED
    code = watch(child)
    end_descendants()
    return code


def take_charge(parent: int) -> bool:
    """Makes this process a guard that gets `END` when its parent ends; False when that is not `parent` any more.

    All signals are blocked, those that schedulers send to all processes of a rank too: the rank reacts to them. The
    parent's thread that has started this process must live as long as the guard (prctl(2)).

    Raises:
        OSError: The kernel is not Linux.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # with an inherited SIG_IGN, children could not be waited for
    adopt_orphans()
    tell_kernel(PR_SET_PDEATHSIG, END)
    return os.getppid() == parent  # it may have died before the signal was set


def under_guard(owner: int, folder: str) -> None:
    """Returns in a fork; this process is its guard, and ends with it or with the process of which `owner` is a pidfd.

    It removes `folder` then. It needs no parent-death signal: threads that start boxes may end long before `owner`.
    """
    import shutil  # here, because it takes longer than all other modules, and programs wait for these

    child = os.fork()
    if child == 0:
        return
    adopt_orphans()
    ended = select.poll()
    for descriptor in (ctypes.CDLL(None).syscall(PIDFD_OPEN, child, 0), owner):
        ended.register(descriptor, select.POLLIN)
    ended.poll()
    end_descendants()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def adopt_orphans() -> None:
    """Makes this process the parent of all descendants that have lost theirs."""
    tell_kernel(PR_SET_CHILD_SUBREAPER, 1)


def tell_kernel(option: int, value: int) -> None:
    """prctl(2); raises OSError where it fails."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed; it needs Linux")


def watch(child: int, passed_on: tuple[int, ...] = ()) -> int:
    """The child's exit code, or 0 when `END` arrives first; reaps the orphans that become children of this process.

    Signals of `passed_on` are sent to the child as well.
    """
    while (number := signal.sigwait((signal.SIGCHLD, END, *passed_on))) != END:
        if number in passed_on:
            os.kill(child, number)  # not reaped yet, so its process id is still its own
            continue
        pid = -1
        while pid:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
    return 0


def end_descendants() -> None:
    """Kills children until none are left: those of a child that dies become children of this process."""
    with suppress(ChildProcessError):  # none are left
        while True:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            for pid in _children():
                os.kill(pid, signal.SIGKILL)  # not reaped yet, so its process id is still its own
            os.waitpid(-1, 0)


def _children() -> list[int]:
    """The process ids of this process' children."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            parent = file.read().rpartition(b")")[2].split()[1]  # the name, in parentheses, may hold anything
            if int(parent) == os.getpid():
                found.append(int(name))
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
