"""Pool of sandbox processes (boxes), as many as programs may run at once; a lost box is replaced."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import PurePosixPath
from typing import Any

from grpo_mega.judges.sandbox.box import Box
from grpo_mega.judges.sandbox.cpus import share_of_cpus
from grpo_mega.judges.sandbox.limits import Limits, Outcome
from grpo_mega.judges.sandbox.start import BoxError, Mechanism
from grpo_mega.judges.sandbox.watch import BoxLost

MECHANISMS: tuple[Mechanism, ...] = ("bubblewrap", "landlock")
"""Containment mechanisms, best first."""
PAGE = 4096
"""Smallest number of bytes that a file in /tmp takes."""
FIX = (
    "apt-get install bubblewrap, and allow user namespaces: sysctl user.max_user_namespaces=10000, and on Ubuntu "
    "sysctl kernel.apparmor_restrict_unprivileged_userns=0; or a Linux with Landlock, 5.13 or newer"
)


class SandboxUnavailable(RuntimeError):
    """No containment mechanism works on this machine; says what was tried, why it failed, and the fix."""


@dataclass(frozen=True)
class BoxCall:
    """A function to call once a program has run.

    Attributes:
        name: Name of the function, or `Class.method`.
        arguments: Arguments, which JSON can hold.
        imports: Statements that run first, in the program's namespace.
    """

    name: str
    arguments: Sequence[Any] = field(default_factory=list)
    imports: str = ""


class Sandbox:
    """Runs programs, several at once from several threads, each in a fresh process.

    Nothing is shared between programs: neither files nor memory nor processes. The sandbox and all that runs in it end
    when this process ends, or when it is closed or garbage-collected. A fork of this process must create a
    sandbox for itself.
    """

    def __init__(
        self,
        boxes: int | None = None,
        mechanism: Mechanism | None = None,
        read_only: Sequence[str] = (),
        run_without_isolation: bool = False,
    ) -> None:
        """Tries the mechanisms; boxes are started when they are needed.

        Args:
            boxes: Programs that run at once; by default as many as this rank has CPUs (`share_of_cpus`).
            mechanism: How programs are contained; by default the best mechanism that works here.
            read_only: Further files and folders that programs may read, such as packages.
            run_without_isolation: Where no mechanism works, programs run with this user's rights, files and processes,
                under limits and, where the kernel has it, a seccomp filter. Set it only if you trust what a policy may
                write.

        Raises:
            SandboxUnavailable: No mechanism works here.
        """
        if mechanism is None:
            mechanism, why = best_mechanism()
            if mechanism is None:
                if not run_without_isolation:
                    raise SandboxUnavailable(f"no sandbox works on this machine: {why}. {FIX}")
                mechanism = "unconfined"
        elif mechanism == "unconfined" and not run_without_isolation:
            raise SandboxUnavailable("mechanism='unconfined' contains nothing: it needs run_without_isolation=True")
        elif why := problem(mechanism):
            raise SandboxUnavailable(f"{why}. {FIX}")
        self.mechanism: Mechanism = mechanism
        self._read_only = tuple(read_only)
        self.boxes = boxes or share_of_cpus()
        self._free = threading.Semaphore(self.boxes)
        self._idle: list[Box] = []
        self._owner = os.getpid()
        # The callback gets the list, not `self`: a reference to `self` would keep the sandbox from ever being
        # collected.
        self._end = weakref.finalize(self, _close, self._idle, os.getpid())

    def run(
        self,
        argv: Sequence[str],
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> Outcome:
        """Runs a command in a folder that has `files`: {relative path: content}.

        Raises ValueError for files that exceed the limits or lie outside the folder.
        """
        return self._execute({"argv": [*argv], "source": "", "call": None}, files, stdin, limits)

    def python(
        self,
        source: str,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        limits: Limits | None = None,
        call: BoxCall | None = None,
    ) -> Outcome:
        """Runs a Python program, with the standard library, in a fork of a waiting interpreter.

        With `call`, `Outcome.result` is what the function returned, as JSON; a value that JSON cannot hold is an error
        of the program. Raises ValueError for files that exceed the limits or lie outside the folder.
        """
        called = (call.imports, call.name, [*call.arguments]) if call else None
        return self._execute({"argv": None, "source": source, "call": called}, files, stdin, limits)

    def close(self) -> None:
        """Closes every idle box; the next program starts a new one."""
        while (box := self._take_idle()) is not None:
            box.close()

    def _execute(
        self, request: dict[str, Any], files: Mapping[str, bytes] | None, stdin: bytes, limits: Limits | None
    ) -> Outcome:
        limits = limits or Limits()
        request["files"] = _checked(files or {}, limits)
        # A fork must not talk to its parent's boxes, and threads that would release the semaphore do not exist in it.
        if os.getpid() != self._owner:
            raise RuntimeError("this process is a fork of the one that created the Sandbox: create another one here")
        # A program whose box fails runs once more, in a new box: the same cause may have ended the idle ones.
        with self._free:
            for again in (False, True):
                try:
                    box = (None if again else self._take_idle()) or Box(self.mechanism, self._read_only)
                except BoxError as error:
                    return Outcome("infrastructure", reason=str(error))
                try:
                    outcome = box.run(request, stdin, limits)
                except BoxError as error:
                    box.close()
                    outcome = Outcome("infrastructure", reason=str(error))
                except BoxLost as error:
                    box.close()
                    outcome = Outcome("lost", reason=str(error))
                # After KeyboardInterrupt and the like the box may still run the program, so it cannot be used again.
                except BaseException:
                    box.close()
                    raise
                else:
                    self._idle.append(box)
                    return outcome
        return outcome

    def _take_idle(self) -> Box | None:
        """A live idle box, or None."""
        while self._idle:
            # Several threads share the list without a lock: another one may take the last box after the test above.
            try:
                box = self._idle.pop()
            except IndexError:
                break
            if box.alive:
                return box
            box.close()
        return None


def best_mechanism() -> tuple[Mechanism | None, str]:
    """The best mechanism that works on this machine, and why the better ones do not; None when none works."""
    problems: list[str] = []
    for mechanism in MECHANISMS:
        why = problem(mechanism)
        if not why:
            return mechanism, "; ".join(problems)
        problems.append(why)
    return None, "; ".join(problems)


@cache
def problem(mechanism: Mechanism) -> str:
    """Why a mechanism does not work on this machine, found by running a program in it; empty when it works."""
    try:
        box = Box(mechanism)
    except BoxError as error:
        return str(error)
    try:
        request: dict[str, Any] = {"argv": None, "source": "print(40 + 2)", "call": None, "files": {}}
        outcome = box.run(request, b"", Limits())
    except (BoxError, BoxLost) as error:
        return f"{mechanism}: {error}"
    finally:
        box.close()
    return "" if outcome.stdout == b"42\n" else f"{mechanism}: a program that prints 42 did not: {outcome}"


def _checked(files: Mapping[str, bytes], limits: Limits) -> dict[str, bytes]:
    for name in files:
        path = PurePosixPath(name)
        if not name or path.is_absolute() or ".." in path.parts:
            raise ValueError(f"file {name!r}: a path within the program's folder is needed, without '..'")
    # A file in memory takes whole pages, so each size is rounded up.
    size = sum(-(-len(content) // PAGE) * PAGE for content in files.values())
    if size > limits.tmp_bytes // 2 or len(files) > limits.tmp_files // 2:
        raise ValueError(
            f"{len(files)} files of {size:,} bytes: at most half of tmp_files={limits.tmp_files} and of "
            f"tmp_bytes={limits.tmp_bytes:,} may be there when a program begins"
        )
    return dict(files)


def _close(idle: list[Box], owner: int) -> None:
    """Closes idle boxes at the end of the process `owner` that started them; does nothing in its forks."""
    if os.getpid() == owner:
        while idle:
            idle.pop().close()
