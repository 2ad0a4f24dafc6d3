"""A seccomp filter: system calls that a program in a sandbox may not make (seccomp(2)), set up by ctypes alone.

The second line of defence. The first, namespaces or Landlock, limits what a program can reach; the filter removes the
calls that could weaken it (new namespaces, mounts, other ways to make system calls) and those that it does not cover:
sockets, shared memory and messages of System V, keys, memory that no limit counts, watches on files, other processes.
Calls newer than the table do not exist for the program.

It runs inside the box: only the standard library, and no other file of this project.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from dataclasses import dataclass

NEVER = """
connect 42 203, bind 49 200, listen 50 201, accept 43 202, accept4 288 242, socket 41 198, ptrace 101 117,
process_vm_readv 310 270, process_vm_writev 311 271, process_madvise 440 440, process_mrelease 448 448,
kcmp 312 272, pidfd_open 434 434, pidfd_getfd 438 438, pidfd_send_signal 424 424, mount 165 40,
umount2 166 39, pivot_root 155 41, chroot 161 51, open_tree 428 428, move_mount 429 429, fsopen 430 430,
fsconfig 431 431, fsmount 432 432, fspick 433 433, mount_setattr 442 442, unshare 272 97, setns 308 268,
bpf 321 280, perf_event_open 298 241, userfaultfd 323 282, io_uring_setup 425 425, io_uring_enter 426 426,
io_uring_register 427 427, io_setup 206 0, keyctl 250 219, add_key 248 217, request_key 249 218,
shmget 29 194, shmat 30 196, shmctl 31 195, msgget 68 186, msgsnd 69 189, msgrcv 70 188, msgctl 71 187,
semget 64 190, semop 65 193, semtimedop 220 192, semctl 66 191, mq_open 240 180, mq_unlink 241 181,
memfd_create 319 279, memfd_secret 447 447, init_module 175 105, finit_module 313 273,
delete_module 176 106, kexec_load 246 104, kexec_file_load 320 294, reboot 169 142, swapon 167 224,
swapoff 168 225, syslog 103 116, quotactl 179 60, quotactl_fd 443 443, acct 163 89, settimeofday 164 170,
clock_settime 227 112, clock_adjtime 305 266, adjtimex 159 171, sethostname 170 161, setdomainname 171 162,
iopl 172 -, ioperm 173 -, modify_ldt 154 -, lookup_dcookie 212 18, vhangup 153 58, fanotify_init 300 262,
name_to_handle_at 303 264, open_by_handle_at 304 265, move_pages 279 239, migrate_pages 256 238,
mbind 237 235, set_mempolicy 238 237, set_mempolicy_home_node 450 450, sched_setaffinity 203 122,
sched_setscheduler 144 119, sched_setparam 142 118, sched_setattr 314 274, setpriority 141 140, ioprio_set 251 30,
vmsplice 278 75, splice 275 76, tee 276 77, sendfile 40 71,
inotify_init 253 -, inotify_init1 294 26, inotify_add_watch 254 27, inotify_rm_watch 255 28
"""
"""Calls that fail with EPERM: name, number on x86_64, number on aarch64 (- where it does not exist).

`vmsplice`, `splice`, `tee` and `sendfile` put pages into pipes: there they stay when the program unmaps them or cuts
the file, a huge page for each 4 KiB that the pipe counts. `inotify` tells names in folders that Landlock does not let a
program list, and takes watches that the kernel counts for the user."""
WITHOUT_NAMESPACES = """
setsid 112 157, setpgid 109 154, tkill 200 130, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240,
chmod 90 -, fchmod 91 52, fchmodat 268 53, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54,
utime 132 -, utimes 235 -, utimensat 280 88, futimesat 261 -, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7,
removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, truncate 76 45, creat 85 -, openat2 437 437
"""
"""Further calls that fail where no namespaces hide files and processes of the same user. Landlock does not check
changes of modes, owners, times and attributes. A program that left its process group would survive the group."""
ARGUMENTS = """
clone3 435 435, clone 56 220, socketpair 53 199, prlimit64 302 261, fcntl 72 25, ioctl 16 29, mmap 9 222,
kill 62 129, tgkill 234 131, open 2 -, openat 257 56
"""
"""Calls that are allowed or refused by their arguments."""
NEWEST = 450
"""Newest call known to the tables, on both architectures; later calls have the same number on all."""

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Architecture -> column of the tables, and its constant in audit.h."""
NEW_NAMESPACES = 0x7E020080
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET and NEWTIME."""
O_CREAT, O_TRUNC = 0o100, 0o1000
F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ = 8, 10, 15, 1024, 1026, 1031
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
OF_TERMINALS, TYPES_OF_IOCTL = 0x5400, 0xFF00
"""Type of the ioctls of terminals and of those of all descriptors (FIONREAD, FIONBIO), and its bits in the number."""
MAP_SHARED, MAP_ANONYMOUS, MAP_HUGETLB = 0x01, 0x20, 0x40000
AF_UNIX, SOCK_STREAM, SOCK_TYPES = 1, 1, 0xF

LOAD, EQUAL, AT_LEAST, ANY_BIT, AND, RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
ALLOW, FAIL, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER, MACHINE, FIRST_ARGUMENT = 0, 4, 16
"""Offsets in the kernel's struct seccomp_data; arguments have eight bytes, of which the first four are read."""
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, FILTER_MODE = 38, 22, 2

Instruction = tuple[int, int, int, int]


@dataclass(frozen=True)
class ArgumentCheck:
    """Condition on an argument: the call fails if the value has any of `bits`, is `one_of`, or is not in `none_of`."""

    argument: int
    bits: int = 0
    one_of: tuple[int, ...] = ()
    none_of: tuple[int, ...] = ()
    mask: int = 0xFFFFFFFF


def numbers(table: str, column: int) -> dict[str, int]:
    """Name -> number of the system calls of a table that exist on an architecture."""
    rows = [row.split() for row in table.replace("\n", " ").split(",")]
    return {name: int(found[column]) for name, *found in rows if found[column] != "-"}


def instructions(namespaces: bool, pid: int, machine: str) -> list[Instruction]:
    """The filter as (code, jump if true, jump if false, constant), of classic BPF.

    Args:
        namespaces: Whether the program has its own namespaces; without them the rules are stricter.
        pid: The program's process id, the only one that it may send signals to without namespaces.
        machine: Architecture, as in `platform.machine()`.

    Raises:
        OSError: The tables lack this architecture.
    """
    if machine not in MACHINES:
        raise OSError(errno.ENOSYS, f"system calls of {machine} are not known, only those of {', '.join(MACHINES)}")
    column, name_of_kernel = MACHINES[machine]
    filter_: list[Instruction] = [
        (LOAD, 0, 0, MACHINE),
        (EQUAL, 1, 0, name_of_kernel),
        # Calls of another architecture that this machine also runs, such as 32-bit ones, have other numbers.
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 0, 1, NEWEST + 1),
        (RETURN, 0, 0, FAIL | errno.ENOSYS),
    ]
    never = numbers(NEVER, column) | ({} if namespaces else numbers(WITHOUT_NAMESPACES, column))
    for number in never.values():
        filter_ += [(EQUAL, 0, 1, number), (RETURN, 0, 0, FAIL | errno.EPERM)]
    known = numbers(ARGUMENTS, column)
    # Its arguments lie in memory, which a filter cannot read; the C library then falls back to clone.
    filter_ += [(EQUAL, 0, 1, known["clone3"]), (RETURN, 0, 0, FAIL | errno.ENOSYS)]
    for name, checks in _checks(namespaces, pid).items():
        if name in known:
            filter_ += _block(known[name], checks)
    return [*filter_, (RETURN, 0, 0, ALLOW)]


def _checks(namespaces: bool, pid: int) -> dict[str, list[ArgumentCheck]]:
    """System call -> conditions on its arguments."""
    checks = {
        "clone": [ArgumentCheck(0, bits=NEW_NAMESPACES)],
        # Datagram sockets of a pair could send to any address, so only streams are allowed.
        "socketpair": [ArgumentCheck(0, none_of=(AF_UNIX,)), ArgumentCheck(1, none_of=(SOCK_STREAM,), mask=SOCK_TYPES)],
        "prlimit64": [ArgumentCheck(0, none_of=(0, pid))],
        # Those of file systems change the flags of files that are only open for reading, those of sockets send signals.
        "ioctl": [
            ArgumentCheck(1, none_of=(OF_TERMINALS,), mask=TYPES_OF_IOCTL),
            ArgumentCheck(1, one_of=(TIOCSTI, TIOCLINUX)),
        ],
        # Signals to a process of the caller's choice, files that others wait for, pipes that hold 16 times as much.
        "fcntl": [ArgumentCheck(1, one_of=(F_SETOWN, F_SETOWN_EX, F_SETSIG, F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ))],
        # Shared memory stays whole as long as one page of it is mapped, and only that page counts.
        "mmap": [
            ArgumentCheck(3, one_of=(MAP_SHARED | MAP_ANONYMOUS,), mask=MAP_SHARED | MAP_ANONYMOUS),
            ArgumentCheck(3, bits=MAP_HUGETLB),
        ],
    }
    if not namespaces:
        checks |= {
            "kill": [ArgumentCheck(0, none_of=(0, pid))],
            "tgkill": [ArgumentCheck(0, none_of=(pid,))],
            "open": [ArgumentCheck(1, bits=O_CREAT | O_TRUNC)],
            "openat": [ArgumentCheck(2, bits=O_CREAT | O_TRUNC)],
        }
    return checks


def _block(number: int, checks: list[ArgumentCheck]) -> list[Instruction]:
    """Instructions for one call; they end the filter when the call matches."""
    body: list[Instruction] = []
    fail = (RETURN, 0, 0, FAIL | errno.EPERM)
    for check in checks:
        body += [(LOAD, 0, 0, FIRST_ARGUMENT + 8 * check.argument), (AND, 0, 0, check.mask)]
        if check.bits:
            body += [(ANY_BIT, 0, 1, check.bits), fail]
        for value in check.one_of:
            body += [(EQUAL, 0, 1, value), fail]
        left = len(check.none_of)
        # Each match jumps over the values that follow it and over the failure.
        body += [(EQUAL, left - index, 0, value) for index, value in enumerate(check.none_of)]
        body += [fail] if check.none_of else []
    body.append((RETURN, 0, 0, ALLOW))
    # Jump distances are one byte, so a block must stay below 256 instructions.
    return [(EQUAL, 0, len(body), number), *body]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def install(namespaces: bool) -> None:
    """Filters the system calls of this process and its descendants, for good.

    Raises OSError where the kernel has no seccomp, or the tables lack the architecture.
    """
    listed = instructions(namespaces, os.getpid(), platform.machine())
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in listed))
    program = _Program(len(listed), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0), (PR_SET_SECCOMP, FILTER_MODE, ctypes.byref(program))):
        if libc.prctl(*arguments, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({arguments[0]}): {os.strerror(ctypes.get_errno())}")
