"""What a program in a sandbox may use, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal


@dataclass(frozen=True)
class Limits:
    """What one program may use. What exceeds a limit fails inside the program, or ends it.

    Attributes:
        cpu_seconds: CPU time of one process, in whole seconds: unlike wall time, the same on a busy machine.
        wall_seconds: Time by the clock, for programs that wait; all processes of the program end with it. Time in which
            the program waits for a CPU that others have does not count, but for as long again at most.
        memory_bytes: Address space of one process; and memory that all of them have in use, which is looked at four
            times a second where the kernel lists a process' children. Pages that they share count once.
        processes: Processes and threads at once.
        file_bytes: Size of one file that the program writes.
        tmp_bytes: Size of all files in the program's /tmp, which is in memory.
        tmp_files: Number of files and folders in it.
        open_files: Descriptors of one process.
        output_bytes: Standard output and a function's result, each; what goes to standard error beyond it is dropped.
    """

    cpu_seconds: int = 5
    wall_seconds: float = 20.0
    memory_bytes: int = 1 << 30
    processes: int = 16
    file_bytes: int = 16 << 20
    tmp_bytes: int = 32 << 20
    tmp_files: int = 1000
    open_files: int = 64
    output_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value <= 0:
                raise ValueError(f"{field.name}={value}: a limit must be positive")
            if field.name != "wall_seconds" and not isinstance(value, int):
                raise ValueError(f"{field.name}={value}: it must be a whole number")


Status = Literal["exited", "time", "output", "memory", "lost", "infrastructure"]


@dataclass(frozen=True)
class Outcome:
    """What became of a program.

    Attributes:
        status: "exited" (by itself, or by a signal), "time" (its CPU or wall time ran out), "output" (it wrote more
            than it may), "memory" (its processes together used more than one may), "lost" (its box ended while it ran,
            twice: it may have used up the machine's memory) or "infrastructure" (no box could be started, or the
            program did not get a CPU on a busy machine: nothing is known about it).
        exit_code: As of `subprocess`: the signal's number, negative, when a signal ended it. None unless it exited.
        stdout, stderr: What it wrote; cut at `output_bytes`.
        result: What a called function returned, as JSON; empty when it did not return.
        seconds: Time by the clock.
        reason: In words, why it did not exit.
    """

    status: Status
    exit_code: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    result: bytes = b""
    seconds: float = 0.0
    reason: str = ""

    @property
    def succeeded(self) -> bool:
        """Whether it exited with code 0."""
        return self.status == "exited" and self.exit_code == 0
