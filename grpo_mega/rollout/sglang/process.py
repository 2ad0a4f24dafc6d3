"""The trainer's handle of an SGLang engine in a separate process: requests, answers, log, termination.

Why not `sglang.Engine` in the trainer itself: when one of its processes fails, SGLang kills the process that created
the engine; it also replaces signal handlers, and on a CPU it would be affected by the substitutions that Megatron
needs. With the engine in a separate process, the trainer outlives any engine, notices when one dies, and starts
another. They communicate by a pipe, without an HTTP server or Ray.

The engine's processes form a process group. They do not receive the signals that ask the trainer to stop, and they are
killed with it: by `end`, or by themselves a second after the trainer has ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil

from grpo_mega.platform.stop import shielded_children
from grpo_mega.rollout.contract import EngineError

LAST_LINES = 15
"""Number of lines of an engine's log that an error shows."""
OF_THE_JOB = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
# One CUDA connection is a setting of Megatron's. torch_memory_saver refuses to run with expandable_segments:True, which
# users may set in the allocator's variables for training.
OF_THE_TRAINER = ("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Prefixes of environment variables meant for the ranks of a job (`OF_THE_JOB`), or for training."""
SECONDS_TO_DIE = 30.0
"""Seconds to wait for killed processes to end, which a driver may delay."""


class EngineLost(EngineError):
    """The engine died, or did not answer in time and was killed."""


class EngineProcess:
    """A running engine.

    Attributes:
        facts: "version" of SGLang, and the "pids" of the engine's processes.
    """

    def __init__(
        self, name: str, arguments: dict[str, Any], log: Path, environment: dict[str, str], seconds: float
    ) -> None:
        """Starts an engine, and waits until it is ready.

        Args:
            name: The engine's name in errors.
            arguments: SGLang's server arguments.
            log: File to which the output of the engine's processes is appended.
            environment: Variables in addition to those of this process.
            seconds: Time limit of the start.

        Raises:
            EngineError: The engine refused the arguments; its processes have ended.
            EngineLost: The engine died, or was not ready in time.
        """
        self._name, self._log, self._requests = name, log, 0
        self._connection, engine_end = Pipe()
        # `engine_end` is closed here once the child has it: with a copy left open in this process, `hear` would never
        # see the end of file by which it notices that the engine has died.
        with shielded_children(), log.open("ab") as file, engine_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "grpo_mega.rollout.sglang.host", str(engine_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                # Without the variables of the trainer's job, since the engine's processes form a separate one: with
                # torchrun's they would wait for a store that does not exist.
                env={k: v for k, v in os.environ.items() if not k.startswith(OF_THE_JOB + OF_THE_TRAINER)}
                | environment,
                pass_fds=[engine_end.fileno()],
                # Makes the child the leader of a new process group, which `end` kills as a whole: SGLang starts
                # further processes, and the trainer knows only this one.
                start_new_session=True,
            )
        try:
            self.facts = self.ask("start", seconds, **arguments)
        except BaseException:
            self.end()
            raise

    def ask(self, method: str, seconds: float, **arguments: Any) -> Any:
        """Sends a request and returns the answer, which must arrive within `seconds`.

        Raises:
            EngineError: The engine refused the request, or failed at it; with its message.
            EngineLost: There was no answer in time.
        """
        request = self.tell(method, **arguments)
        until = time.monotonic() + seconds
        # Any other message, such as a late sign of life, is left over from a generation that has ended, and is skipped.
        while message := self.hear(max(0.0, until - time.monotonic())):
            if message[:2] == ("error", request):
                raise self.refusal(message[2])
            if message[:2] == ("answer", request):
                return message[2]
        raise self.lost(f"did not answer {method} within {seconds:g} s")

    def tell(self, method: str, **arguments: Any) -> int:
        """Sends a request; returns its number, which is part of the answer that `hear` returns."""
        self._requests += 1
        try:
            self._connection.send((self._requests, method, arguments))
        except OSError as error:
            raise self.lost(f"died before {method}") from error
        return self._requests

    def hear(self, seconds: float) -> tuple[Any, ...] | None:
        """Next message of the engine, see `host.py`; None when none arrives within `seconds`."""
        try:
            return self._connection.recv() if self._connection.poll(seconds) else None
        except (EOFError, OSError) as error:
            raise self.lost("died") from error

    def refusal(self, message: str) -> EngineError:
        """Error for a request that the engine refused with this message."""
        return EngineError(f"{self._name}: {message}; its log is {self._log}")

    def lost(self, what: str) -> EngineLost:
        """Kills the engine; returns the error, with the last lines of the engine's log."""
        # The log is read only once no process can write to it any more.
        self.end()
        lines = self._log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return EngineLost("\n".join([f"{self._name} {what}; the last lines of {self._log}:", *lines]))

    def end(self) -> None:
        """Kills all processes of the engine, in any state."""
        if self._connection.closed:
            return
        self._connection.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS_TO_DIE)
        # `wait` covers only the child. Its descendants hold the GPU memory that a restarted engine needs.
        give_up = time.monotonic() + SECONDS_TO_DIE
        while any(map(_alive, _members(self._process.pid))) and time.monotonic() < give_up:
            time.sleep(0.01)


def _members(group: int) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == group:
                yield process


def _alive(process: psutil.Process) -> bool:
    """Whether a process can hold memory; a zombie, which another process has to reap, cannot."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
