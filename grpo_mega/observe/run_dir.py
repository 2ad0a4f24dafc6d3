"""The run directory: one experiment, one live process.

    runs/NAME/  config.yaml  run.json  run.lock  metrics.jsonl  samples/  checkpoints/  tensorboard/  logs/
                summary.json  curves.png  slurm/

`run.json` holds the identity of the experiment: the part of the configuration that must not change between starts.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mega.observe.files import write_atomic

IDENTITY = "run.json"
LOCK = "run.lock"
LAUNCHER = "slurm"
"""The launcher's folder: code and logs of jobs, there before the run begins."""
FOLDERS = ("samples", "checkpoints", "logs")
WAY_OUT = "choose another run.name or delete the directory"


@dataclass(frozen=True)
class RunDir:
    """An open run directory. Its lock is held until `close`, or until the process ends, however it ends."""

    path: Path
    lock: int

    def close(self) -> None:
        """Releases the lock."""
        os.close(self.lock)


def open_run_dir(path: Path, config_yaml: str, *, identity: dict[str, Any]) -> RunDir:
    """Creates the run directory or re-opens the one of the same experiment. Called on rank 0 only, before any logging.

    Args:
        path: The directory, `run.root`/`run.name`.
        config_yaml: The resolved configuration, written to config.yaml.
        identity: Dotted key to value (as JSON knows them) of everything that must not change between starts.

    Raises:
        ValueError: The path is something else than a run directory, holds another experiment (each differing key is
            listed with both values), or is in use by a live process.
    """
    _refuse_foreign(path)
    path.mkdir(parents=True, exist_ok=True)
    lock = _acquire_lock(path)
    try:
        _claim(path, identity)
        write_atomic(path / "config.yaml", config_yaml)
        for folder in FOLDERS:
            (path / folder).mkdir(exist_ok=True)
    except BaseException:
        os.close(lock)
        raise
    return RunDir(path, lock)


def check_run_dir(path: Path, *, identity: dict[str, Any]) -> None:
    """Raises what `open_run_dir` would raise over a directory that is not in use, and writes nothing."""
    _refuse_foreign(path)
    if (path / IDENTITY).exists():
        _compare(path, json.loads(json.dumps(identity)))


def _refuse_foreign(path: Path) -> None:
    """Refuses what is not a run directory; one whose creation was cut short counts as a run directory."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is not a directory: {WAY_OUT}")
    if not path.exists() or (path / IDENTITY).exists():
        return
    foreign = sorted({entry.name for entry in path.iterdir()} - {LOCK, LAUNCHER, f".{IDENTITY}.tmp"})
    if foreign:
        raise ValueError(f"{path} is not a run directory (no {IDENTITY}) but holds {', '.join(foreign[:5])}: {WAY_OUT}")


def _acquire_lock(path: Path) -> int:
    """Takes the directory's lock without waiting; returns its descriptor, which garbage collection never closes."""
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 256, 0).decode().strip() or "a process that just started"
        os.close(lock)
        raise ValueError(f"{path} is in use by {holder}: wait for it, stop it, or choose another run.name") from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return lock


def _claim(path: Path, identity: dict[str, Any]) -> None:
    """Writes the identity of a new run, or compares it with the one that is there."""
    file = path / IDENTITY
    wanted = json.loads(json.dumps(identity))
    if file.exists():
        _compare(path, wanted)
    else:
        write_atomic(file, json.dumps(wanted, indent=2) + "\n")


def _compare(path: Path, wanted: dict[str, Any]) -> None:
    """Refuses a run directory whose identity is not the `wanted` one, as JSON knows it."""
    found = _read_identity(path / IDENTITY)
    differing = [key for key in sorted({*wanted, *found}) if _shown(wanted, key) != _shown(found, key)]
    if differing:
        lines = [f"  {key}: {_shown(found, key)} there, {_shown(wanted, key)} now" for key in differing]
        raise ValueError("\n".join([f"{path} belongs to another experiment:", *lines, WAY_OUT]))


def _read_identity(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}): {WAY_OUT}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} does not hold an object: {WAY_OUT}")
    return found


def _shown(identity: dict[str, Any], key: str) -> str:
    return json.dumps(identity[key], sort_keys=True) if key in identity else "absent"
