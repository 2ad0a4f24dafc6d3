"""Landlock (landlock(7)): restricts the files that a program may read, without namespaces or privileges, by ctypes.

Nothing can be written. Version 4 and later also refuse TCP, version 6 and later abstract sockets and signals to other
processes; the seccomp filter refuses these on every version.

It runs inside the box: only the standard library, and no other file of this project.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

CREATE, ADD_RULE, RESTRICT = 444, 445, 446
"""Numbers of the Landlock system calls, the same on every architecture."""
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
FILES_OF_VERSION = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Number of access rights for files in each version of Landlock."""
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
ZEROS = "/dev/zero"
"""May only be read: mapped for writing it is shared memory, which the seccomp filter refuses without a file."""
PR_SET_NO_NEW_PRIVS = 38
_PATH_BENEATH = 1

_C = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """Landlock's version in this kernel; 0 where it is missing or switched off."""
    return max(0, _C.syscall(CREATE, None, ctypes.c_size_t(0), 1))


def restrict(read_only: Sequence[str]) -> None:
    """Restricts this process and its descendants to reading and executing the given files and folders.

    Paths that do not exist are skipped. Raises OSError where the kernel has no Landlock.
    """
    release = version()
    # Landlock denies only the rights that a ruleset handles: all that this kernel knows, and no others (EINVAL).
    handled = (1 << FILES_OF_VERSION[max(1, min(release, 5))]) - 1
    network, scope = (3 if release >= 4 else 0), (3 if release >= 6 else 0)
    attributes = struct.pack("QQQ", handled, network, scope)[: 24 if release >= 6 else 16 if release >= 4 else 8]
    rules = _call(CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    for path in read_only:
        _allow(rules, path, EXECUTE | READ_FILE | READ_DIR)
    for path in DEVICES:
        _allow(rules, path, READ_FILE | WRITE_FILE)
    _allow(rules, ZEROS, READ_FILE)
    # Without privileges, a process may restrict itself only once it can gain no rights from set-user-ID programs.
    if _C.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    _call(RESTRICT, rules, 0)
    os.close(rules)


def _allow(rules: int, path: str, access: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    # The kernel refuses a rule for a file that grants rights which only folders have.
    if not os.path.isdir(path):
        access &= ~READ_DIR
    _call(ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", access, opened), 0)
    os.close(opened)


def _call(number: int, *arguments: object) -> int:
    result = _C.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"Landlock, call {number}: {os.strerror(ctypes.get_errno())}")
    return result
