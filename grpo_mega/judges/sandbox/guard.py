"""Guards a program: when it or the guard's parent ends, every process that the program has started is killed.

A guard is the subreaper of its descendants: the kernel makes orphans among them its children, even those that have
opened new sessions. The parent-death signal tells the guard when its parent has ended.

    python guard.py PARENT PROGRAM ARGUMENTS...

runs one program under a guard. When the program ends, or the process with id PARENT ends or sends `END`, every process
that the program has started is killed, and the guard exits with the program's exit code; 128 plus the signal's number
for one that was killed, as shells do, and 127 for one that cannot be started.

Only the standard library is imported: every call of a program waits for these imports, and boxes have nothing else.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from contextlib import suppress

END = signal.SIGRTMIN
"""Signal that asks a guard to kill everything under it."""
NOT_STARTED = 127
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PIDFD_OPEN = 434


def main(parent: int, program: list[str]) -> int:
    """Runs the program until it or the process `parent` ends; returns the exit code."""
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
    """Makes this process a guard that gets `END` when its parent ends; False when its parent is no longer `parent`.

    All signals are blocked, including those that schedulers send to all processes of a rank: the rank reacts to them.
    The parent's thread that has started this process must live as long as the guard (prctl(2)).

    Raises:
        OSError: The kernel is not Linux.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    # With an inherited SIG_IGN, the kernel would reap children itself, and none could be waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    adopt_orphans()
    tell_kernel(PR_SET_PDEATHSIG, END)
    # A parent that died before the line above sends no signal, so this check must come after it.
    return os.getppid() == parent


def under_guard(owner: int, folder: str) -> None:
    """Returns in a fork; this process becomes its guard and ends with it or with the process of the pidfd `owner`.

    The guard then removes `folder`. It uses no parent-death signal, as threads that start boxes may end long before
    `owner`.
    """
    # Imported here because it takes longer than all other modules, and programs wait for the imports at the top.
    import shutil

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
    """Makes this process the parent of descendants whose own parent has ended (a subreaper)."""
    tell_kernel(PR_SET_CHILD_SUBREAPER, 1)


def tell_kernel(option: int, value: int) -> None:
    """Calls prctl(2); raises OSError where it fails."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed; it needs Linux")


def watch(child: int, passed_on: tuple[int, ...] = ()) -> int:
    """Waits for a child and returns its exit code, or 0 when `END` arrives first; reaps adopted orphans.

    Signals in `passed_on` are forwarded to the child.
    """
    while (number := signal.sigwait((signal.SIGCHLD, END, *passed_on))) != END:
        if number in passed_on:
            # The child has not been reaped yet, so its process id cannot belong to another process.
            os.kill(child, number)
            continue
        # One SIGCHLD may stand for several ended children, as the kernel does not queue it.
        pid = -1
        while pid:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
    return 0


def end_descendants() -> None:
    """Kills all descendants: repeats until no child is left, as the children of a killed child move to this process."""
    # `waitpid` raises ChildProcessError once no child is left.
    with suppress(ChildProcessError):
        while True:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            for pid in _children():
                # Only this process reaps its children, so `pid` cannot have passed to another process meanwhile.
                os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def _children() -> list[int]:
    """Process ids of this process's children."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            # The second field, the name in parentheses, may itself contain spaces and parentheses.
            parent = file.read().rpartition(b")")[2].split()[1]
            if int(parent) == os.getpid():
                found.append(int(name))
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
