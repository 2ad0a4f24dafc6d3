"""Command line of a sandbox process (a box), with its interpreter, user and environment.

The process that starts a box needs no privileges. Where it is root, each box gets a separate user id: the kernel does
not limit root's number of processes, and all boxes of one user would share that user's limit.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

Mechanism = Literal["bubblewrap", "landlock", "unconfined"]

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
"""Files and folders that programs may read, besides the interpreter."""
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""The whole environment of a program."""
NOBODY_ELSE = 1 << 24
"""Number of user ids from which a box's id is drawn."""

_HERE = Path(__file__).parent
# The box cannot read this project's files, so it gets the modules it needs over standard input.
_BEGIN = """
import json, sys, types
sys.path.remove("")
for name, text in json.load(sys.stdin).items():
    module = sys.modules[name] = types.ModuleType(name)
    parent, _, own = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own, module)
    exec(compile(text, name, "exec"), module.__dict__)
control, owner, mechanism, *read_only = sys.argv[1:]
sys.modules["grpo_mega.judges.sandbox.inside"].main(int(control), int(owner), mechanism, read_only)
"""


class BoxError(Exception):
    """A box, or a program in it, could not be started; says why."""


def interpreter(uid: int | None) -> tuple[str, str]:
    """(path, prefix) of the Python that runs programs: this one, or the system's where `uid` may not read this one.

    Raises BoxError when there is none.
    """
    own = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    for path, prefix in ((own, sys.base_prefix), *((f"{usr}/bin/python3", usr) for usr in ("/usr", "/usr/local"))):
        # Each program gets its own, empty /tmp, which would hide an interpreter there.
        if not os.path.exists(path) or Path(path).is_relative_to("/tmp"):
            continue
        # Another user must be able to read the file and to enter all folders above it.
        needed = [(Path(path), 0o004), *((folder, 0o001) for folder in Path(path).parents)]
        if uid is None or all(place.stat().st_mode & right for place, right in needed):
            return path, prefix
    raise BoxError(
        f"no Python for programs: {own} is in /tmp, where each program sees a private folder, or in a folder that only "
        "root may enter, and root's programs run as other users. apt-get install python3, or chmod o+x the folders"
    )


def unused_uid() -> int | None:
    """A user id for one box; None where this process is not root, or is root of a namespace with too few users."""
    if os.geteuid() != 0:
        return None
    ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    first, count = max(((first, count) for first, _, count in ranges), key=lambda one: one[1])
    # Leaves out -1, which means "no user", and the id before it, 65534 ("nobody").
    last = min(first + count, 1 << 31) - 3
    # With fewer ids, two boxes could easily draw the same one and share its limit of processes.
    if last - first < 4096:
        return None
    return last - secrets.randbelow(min(NOBODY_ELSE, count // 4))


def command(mechanism: Mechanism, uid: int | None, read_only: Sequence[str], descriptors: Sequence[int]) -> list[str]:
    """The command that starts a box.

    Args:
        mechanism: How programs are contained.
        uid: The user that the command will be run by; None for the user of this process.
        read_only: Further files and folders that programs may read.
        descriptors: The box's end of its socket, and a pidfd of this process.

    Raises:
        BoxError: A program that it needs is missing.
    """
    python, prefix = interpreter(uid)
    readable = [path for path in dict.fromkeys((*SYSTEM, prefix, *read_only)) if os.path.exists(path)]
    outer = _bubblewrap(readable) if mechanism == "bubblewrap" else []
    inner = [python, "-s", "-S", "-B", "-X", "utf8", "-c", _BEGIN, *map(str, descriptors), mechanism, *readable]
    # When memory runs out, the kernel should kill programs, not the job. The box ignores the signals that schedulers
    # send to every process of a rank (`TO_RANKS`) from its very start, before Python has set handlers for them.
    first = 'trap "" INT TERM USR1; echo 1000 2>/dev/null >/proc/self/oom_score_adj; exec "$@"'
    return ["/bin/sh", "-c", first, "sh", *outer, *inner]


def _bubblewrap(readable: Sequence[str]) -> list[str]:
    """Start of the command line of a bubblewrap box, which may create further namespaces inside."""
    program = shutil.which("bwrap")
    if program is None:
        raise BoxError("bubblewrap: bwrap is not installed: apt-get install bubblewrap, or conda install bubblewrap")
    command = [program, "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    command += ["--unshare-cgroup-try", "--as-pid-1", "--uid", "65534", "--gid", "65534", "--hostname", "box"]
    # The box keeps one capability, to create the namespaces and mounts of each program, which drops it (`inside.py`).
    command += ["--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN", "--dir", "/tmp", "--dir", "/dev/shm"]
    for path in readable:
        linked = os.path.islink(path)
        command += ["--symlink", os.readlink(path), path] if linked else ["--ro-bind", path, path]
    for path in ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom"):
        command += ["--dev-bind-try", path, path]
    # /dev/full stands in for /dev/zero: it reads as zeros too, but cannot be mapped as shared memory, which the seccomp
    # filter refuses where no file backs it.
    command += ["--dev-bind-try", "/dev/full", "/dev/zero"]
    return [*command, "--remount-ro", "/", "--chdir", "/", "--"]


def modules() -> dict[str, str]:
    """Name -> source of the modules that the box needs, in import order."""
    sources = {
        name: (_HERE / f"{name}.py").read_text() for name in ("guard", "landlock", "seccomp", "program", "inside")
    }
    here = "grpo_mega.judges.sandbox"
    return {"grpo_mega": "", "grpo_mega.judges": "", here: ""} | {f"{here}.{n}": text for n, text in sources.items()}
