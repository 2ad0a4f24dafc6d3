"""Starts `grpo_mega.train`, and knows every process that comes of it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from forks import Fork, Program, exit_code, start, wait_for
from limits import limit
from metric_lines import of_steps, repeated

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
MARK = "GRPO_MEGA_TEST_JOB"
"""Environment variable that all processes of a job inherit: orphans keep it."""
DEADLINE = limit(900.0)
"""Seconds after which anything that is waited for counts as hung."""

SMALL = [
    "experiment=tiny",
    "base.gate_accuracy=0",
    "base.gate_from=10",
    "base.gate_passes=1",
    "base.max_steps=10",
    "base.warmup_steps=0",
    "base.decay_steps=5",
    "base.batch_size=16",
    "data.validation_size=8",
    "data.test_size=8",
    "algorithm.prompts_per_step=8",
    "algorithm.group_size=4",
    "rollout.max_new_tokens=16",
]
"""A run whose base model and steps take a second or two."""


def rewarded_by(function: str) -> str:
    """An override: the rewards of experiment=tiny, and `function` of train_rewards.py as a third term."""
    own = f"{{name:own,function:train_rewards:{function}}}"
    return f"reward.terms=[{{name:accuracy}},{{name:format,weight:0.2}},{own}]"


def wait_until(condition: Callable[[], object], what: str, pause: float = 0.02) -> None:
    """Polls until `condition` holds, every `pause` seconds.

    Raises:
        TimeoutError: It did not become true in time; says `what`.
    """
    deadline = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(pause)


@dataclass(frozen=True)
class Ended:
    """What a job left."""

    code: int
    stdout: str
    stderr: str
    orphans: list[str]


class Job:
    """A run with `ranks` processes, or a single plain process with 0.

    They are forks that have imported the product (`forks.py`). A `cold` job is started as a user does, by torchrun or
    Python, in a process group: for tests of what signals do to it, and of what becomes of its processes.
    """

    def __init__(
        self,
        root: Path,
        overrides: list[str],
        ranks: int = 0,
        environment: dict[str, str] | None = None,
        cold: bool = False,
    ):
        self.id = uuid.uuid4().hex
        self._files = [root / f"{self.id}.{name}" for name in ("stdout", "stderr")]
        module = ["-m", "grpo_mega.train", *overrides, f"run.root={root / 'runs'}"]
        path = os.pathsep.join([str(REPOSITORY), str(HERE)])
        own = os.environ | {MARK: self.id, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | (environment or {})
        self._forks: list[Fork] = []
        if not cold:
            self._forks = start(Program(module, str(root), own, *map(str, self._files)), ranks)
            return
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
        with self._files[0].open("w") as stdout, self._files[1].open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, *torchrun, *module],
                cwd=root,
                env=own,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    def members(self) -> list[psutil.Process]:
        """All living processes of the job, whoever their parent is now."""
        sessions = {fork.pid for fork in self._forks}  # forks themselves have the environment of their parent
        return [p for p in psutil.process_iter() if _mark(p) == self.id or _session(p) in sessions]

    def interrupt(self) -> None:
        """Ctrl-C: what a terminal sends to its foreground process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def interrupt_twice(self) -> None:
        """Ctrl-C, and again when the first rank has noted it."""
        self.interrupt()
        wait_until(lambda: "rank 0: SIGINT received" in self._files[1].read_text(), "no word about Ctrl-C")
        self.interrupt()

    def kill(self) -> None:
        """kill -9 to everything that belongs to the job."""
        for member in self.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()

    def kill_group(self) -> None:
        """kill -9 to the job's process group, faster than `kill`; `finish` finds what is left."""
        os.killpg(self.process.pid, signal.SIGKILL)

    def finish(self) -> Ended:
        """Waits for the end; a job that hangs, and orphans, are killed."""
        try:
            code = exit_code(wait_for(self._forks, DEADLINE)) if self._forks else self.process.wait(DEADLINE)
            if code is None:
                raise TimeoutError("the job does not end")
            _, orphans = psutil.wait_procs(self.members(), timeout=limit(20))
            names = [str(orphan) for orphan in orphans]
        finally:
            self.kill()
        stdout, stderr = (file.read_text() for file in self._files)
        return Ended(code, stdout, stderr, names)

    def wait_until_there(self, path: Path) -> None:
        """Waits for a file that the job writes.

        Raises:
            AssertionError: The job ended before; carries what it printed.
        """
        job = self._forks or [self.process]
        wait_until(lambda: path.exists() or any(each.poll() is not None for each in job), f"no {path}")
        if not path.exists():
            raise AssertionError(self.finish())


def contents(folder: Path) -> dict[str, str]:
    """Digest of every file below a folder, except the lock, which names its last holder."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "run.lock"]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def half_written(folder: Path) -> list[str]:
    """Temporary files and folders that were left behind."""
    return [str(p) for p in folder.rglob("*.tmp")]


def numbers(path: Path) -> list[dict[str, Any]]:
    """The metrics of every step of a run, time and memory aside."""
    return [repeated(line) for line in of_steps(path)]


def samples(path: Path) -> dict[str, Any]:
    """All that the files of a run's samples say, flat: {"FILE:LINE:FIELD:INDEX": value}."""
    found: dict[str, Any] = {}
    for file in sorted((path / "samples").iterdir()):
        for number, line in enumerate(file.read_text().splitlines()):
            for name, value in json.loads(line).items():
                within = dict(enumerate(value)) if isinstance(value, list) else value
                parts = within if isinstance(within, dict) else {"": within}
                found |= {f"{file.name}:{number}:{name}:{at}": part for at, part in parts.items()}
    return found


def differing(found: dict[str, Any], expected: dict[str, Any], by: float) -> dict[str, Any]:
    """Of two `samples`, what is not the same: numbers that differ by more than that, or anything else that differs."""

    def close(one: Any, other: Any) -> bool:
        return one == other or (isinstance(one, float) and isinstance(other, float) and abs(one - other) <= by)

    keys = found.keys() | expected.keys()
    pairs = {key: (found.get(key, "missing"), expected.get(key, "missing")) for key in keys}
    return {key: pair for key, pair in pairs.items() if not close(*pair)}


def without_seconds(file: Path) -> dict[str, Any]:
    """A JSON object without the field that differs from run to run."""
    return {name: value for name, value in json.loads(file.read_text()).items() if name != "seconds"}


def saved(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says: its state, and the digest of every file of tensors or generators."""
    # DCP's index is pickled with an identifier of the save, and the manifest holds its checksum.
    apart = (".metadata", "manifest.json", "state.json")
    digests = {name: digest for name, digest in contents(checkpoint).items() if not name.endswith(apart)}
    return digests | {"state": without_seconds(checkpoint / "state.json")}


def _mark(process: psutil.Process) -> str | None:
    try:
        return None if process.status() == psutil.STATUS_ZOMBIE else process.environ().get(MARK)
    except psutil.Error:
        return None


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return None
