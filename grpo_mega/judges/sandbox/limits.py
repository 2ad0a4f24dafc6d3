"""Resource limits of a program in a sandbox, and the outcome of its run."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal


@dataclass(frozen=True)
class Limits:
    """Resource limits of one program. Exceeding one fails inside the program, or ends it.

    Attributes:
        cpu_seconds: CPU time of one process, in whole seconds: unlike wall time, the same on a busy machine.
        wall_seconds: Wall time, for programs that wait; all processes of the program end with it. Waiting for a CPU
            that others use does not count, up to the same time again.
        memory_bytes: Address space of one process; also memory in use by all of them, which is checked four times a
            second where the kernel lists a process's children. Pages that they share count once.
        processes: Processes and threads at once.
        file_bytes: Size of one file that the program writes.
        tmp_bytes: Size of all files in the program's /tmp, which is in memory.
        tmp_files: Number of files and folders in the program's /tmp.
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
            # They become rlimits, mount options and lengths of buffers, all of which take whole numbers.
            if field.name != "wall_seconds" and not isinstance(value, int):
                raise ValueError(f"{field.name}={value}: it must be a whole number")


Status = Literal["exited", "time", "output", "memory", "lost", "infrastructure"]


@dataclass(frozen=True)
class Outcome:
    """Outcome of a program's run.

    Attributes:
        status: "exited" (by itself, or by a signal), "time" (its CPU or wall time ran out), "output" (it wrote more
            than it may), "memory" (its processes together used more than one may), "lost" (its box ended while the
            program ran, twice: it may have used up the machine's memory) or "infrastructure" (no box could be started,
            or the program did not get a CPU on a busy machine: nothing is known about it).
        exit_code: As in `subprocess`: negative signal number if a signal ended the program. None unless it exited.
        stdout, stderr: Output of the program; cut at `output_bytes`.
        result: Return value of a called function, as JSON; empty when it did not return.
        seconds: Wall time.
        reason: Why the program did not exit, in words.
        box: Process id of the box that it ran in; None when no box told of its end.
    """

    status: Status
    exit_code: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    result: bytes = b""
    seconds: float = 0.0
    reason: str = ""
    box: int | None = None

    @property
    def succeeded(self) -> bool:
        """Whether the program exited with code 0."""
        return self.status == "exited" and self.exit_code == 0
