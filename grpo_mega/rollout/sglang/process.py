"""An SGLang engine in a process of its own, seen from the trainer: requests, answers, its log, and its end.

Why not `sglang.Engine` in the trainer itself: when one of its processes fails, SGLang ends the process that made the
engine; it also replaces signal handlers, and would meet Megatron's substitutions on a CPU. This way the trainer
outlives any engine, notices, and starts another one. There is no HTTP server and no Ray in between, only a pipe.

The engine's processes form a process group. They never see the signals that ask the trainer to stop, and they are
killed with it: by `end`, or by themselves a second after the trainer is gone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil

from grpo_mega.platform.stop import shielded_children
from grpo_mega.rollout.contract import EngineError

LAST_LINES = 15
"""Of an engine's log, shown with an error."""
OF_THE_JOB = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
OF_THE_TRAINER = ("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""What the names of environment variables begin with that are for a job's ranks, or for training."""
SECONDS_TO_DIE = 30.0
"""How long the end of killed processes is waited for; a driver may hold them up."""


class EngineLost(EngineError):
    """The engine died, or did not answer in time and was ended."""


class EngineProcess:
    """A running engine.

    Attributes:
        facts: What it said of itself: "version" of SGLang and the "pids" of its processes.
    """

    def __init__(
        self, name: str, arguments: dict[str, Any], log: Path, environment: dict[str, str], seconds: float
    ) -> None:
        """Starts it.

        Args:
            name: What errors call it.
            arguments: SGLang's server arguments.
            log: What its processes print is appended here.
            environment: Joins that of this process.
            seconds: Until it must be up.

        Raises:
            EngineError: It refused the arguments; nothing is left of it.
            EngineLost: It died or was not up in time.
        """
        self._name, self._log, self._requests = name, log, 0
        self._connection, theirs = Pipe()
        with shielded_children(), log.open("ab") as file, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "grpo_mega.rollout.sglang.host", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=_without_job(os.environ) | environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        try:
            self.facts = self.ask("start", seconds, **arguments)
        except BaseException:
            self.end()
            raise

    def ask(self, method: str, seconds: float, **arguments: Any) -> Any:
        """The answer to a request, which must come within `seconds`.

        Raises:
            EngineError: The engine says that it cannot; with its words.
            EngineLost: There is no answer.
        """
        request = self.tell(method, **arguments)
        until = time.monotonic() + seconds
        while message := self.hear(max(0.0, until - time.monotonic())):
            if message[:2] == ("error", request):
                raise self.refusal(message[2])
            if message[:2] == ("answer", request):
                return message[2]
        raise self.lost(f"did not answer {method} within {seconds:g} s")

    def tell(self, method: str, **arguments: Any) -> int:
        """Sends a request; its number, which is in the answer that `hear` brings."""
        self._requests += 1
        try:
            self._connection.send((self._requests, method, arguments))
        except OSError as error:
            raise self.lost(f"died before {method}") from error
        return self._requests

    def hear(self, seconds: float) -> tuple[Any, ...] | None:
        """The engine's next message, see `host.py`; None when there is none within `seconds`."""
        try:
            return self._connection.recv() if self._connection.poll(seconds) else None
        except (EOFError, OSError) as error:
            raise self.lost("died") from error

    def refusal(self, words: str) -> EngineError:
        """The error that says why the engine cannot do what it was asked for."""
        return EngineError(f"{self._name}: {words}; its log is {self._log}")

    def lost(self, what: str) -> EngineLost:
        """Ends the engine; the error that says so, with the last lines of its log."""
        self.end()
        lines = self._log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return EngineLost("\n".join([f"{self._name} {what}; the last lines of {self._log}:", *lines]))

    def end(self) -> None:
        """Kills all processes of the engine, however it stands."""
        if self._connection.closed:
            return
        self._connection.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS_TO_DIE)
        _wait_until_gone(self._process.pid)


def _without_job(environment: Mapping[str, str]) -> dict[str, str]:
    """Leaves out what says that a process is a rank of the trainer's job: the engine's processes have a job of theirs.

    With torchrun's variables they would wait for a store that nobody has opened.
    """
    return {name: value for name, value in environment.items() if not name.startswith(OF_THE_JOB + OF_THE_TRAINER)}


def _wait_until_gone(group: int) -> None:
    """Until a process group that was killed holds no memory, or does not go away."""
    give_up = time.monotonic() + SECONDS_TO_DIE
    while any(map(_alive, _members(group))) and time.monotonic() < give_up:
        time.sleep(0.01)


def _members(group: int) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == group:
                yield process


def _alive(process: psutil.Process) -> bool:
    """A zombie, which somebody else has to reap, holds nothing."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
