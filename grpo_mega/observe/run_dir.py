"""The run directory: one experiment, one live process.

    runs/NAME/  config.yaml  words.json  run.json  run.lock  metrics.jsonl  samples/  checkpoints/  tensorboard/  logs/
                trace/  flight/  profile/  trackers/
                pretrain.jsonl  sft.jsonl  alarms.jsonl  experts.jsonl  planned.json  summary.json  curves.png
                report.html  slurm/

`run.json` holds the identity of the experiment: the part of the configuration that must not change between starts. The
name is not part of it: a directory may be renamed. Until the directory has a result, a step or a checkpoint, another
experiment may take it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mega.config.load import defaults, identity_in, must_stay
from grpo_mega.errors import InputError
from grpo_mega.observe.metrics import read_metrics
from grpo_mega.observe.summary import SUMMARY
from grpo_mega.platform.files import write_atomic

IDENTITY = "run.json"
CONFIG = "config.yaml"
WORDS = "words.json"
"""File with the arguments of the newest command that started the run: its preset, and what differs from that."""
LOCK = "run.lock"
LAUNCHER = "slurm"
"""Folder of the launcher, with code and logs of jobs, which exists before the run begins."""
CHECKPOINTS = "checkpoints"
PLANNED = "planned.json"
REPORT = "report.html"
"""Page about the run (`grpo_mega/show/report`), written at its end."""
FOLDERS = ("samples", CHECKPOINTS, "logs")
CANNOT_CREATE = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG,
)  # fmt: skip
"""Error numbers for a folder below a file, a read-only file system, a name that is too long."""
FIX = "choose a different run.name, or move the directory away"
FORK = "; run.name=NEW run.fork=CHECKPOINT continues one of its checkpoints with the new settings"


@dataclass(frozen=True)
class RunDir:
    """An open run directory. Its lock is held until `close`, or until the process ends, however it ends."""

    path: Path
    lock: int

    def close(self) -> None:
        """Releases the lock."""
        os.close(self.lock)


@contextmanager
def _uncreatable_is_bad_input() -> Iterator[None]:
    """Turns an OSError about a path that cannot be created into an InputError; others, such as a full disk, pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in CANNOT_CREATE:
            raise
        raise InputError(
            str(error.filename), str(error.strerror), "choose a run.root that can be written to"
        ) from error


@_uncreatable_is_bad_input()
def open_run_dir(path: Path, config_yaml: str, *, identity: dict[str, Any], words: Sequence[str] = ()) -> RunDir:
    """Creates the run directory or re-opens the one of the same experiment. Called on rank 0 only, before any logging.

    A directory without results goes to this experiment; one whose `run.json` is lost is adopted if its config.yaml
    belongs to the same experiment. The summary of an earlier start is removed: from now on the run is not complete.

    Args:
        path: The directory, `run.root`/`run.name`.
        config_yaml: The resolved configuration, a YAML object, written to config.yaml.
        identity: Dotted key to value (as JSON knows them) of everything that must not change between starts.
        words: Arguments of the command, written to words.json.

    Raises:
        InputError: The path is not a run directory, holds another experiment (each differing key is listed with both
            values), is in use by a live process, or cannot be created.
        OSError: Another error of the file system.
    """
    _refuse_foreign(path)
    path.mkdir(parents=True, exist_ok=True)
    # Locked before anything is checked or written: of two commands that start at once, only one may go on.
    lock = _acquire_lock(path)
    try:
        # As JSON returns it: tuples become lists, which compare equal with those of the file.
        wanted = json.loads(json.dumps(identity))
        _refuse_other(path, wanted)
        # `_identity` trusts run.json before config.yaml, so a crash between the two writes does no harm.
        write_atomic(path / IDENTITY, json.dumps(wanted, indent=2) + "\n")
        (path / SUMMARY).unlink(missing_ok=True)
        write_atomic(path / CONFIG, config_yaml)
        write_atomic(path / WORDS, json.dumps([*words]) + "\n")
        for folder in FOLDERS:
            (path / folder).mkdir(exist_ok=True)
    except BaseException:
        os.close(lock)
        raise
    return RunDir(path, lock)


def check_run_dir(path: Path, *, identity: dict[str, Any]) -> None:
    """Raises the errors of `open_run_dir`, except for a directory in use, and writes nothing."""
    _refuse_foreign(path)
    _refuse_other(path, json.loads(json.dumps(identity)))


def _refuse_foreign(path: Path) -> None:
    """Refuses a path that is not a run directory; one whose creation was interrupted counts as one."""
    if path.exists() and not path.is_dir():
        raise InputError(str(path), "is not a directory", FIX)
    if not path.exists() or (path / IDENTITY).exists() or ((path / CONFIG).exists() and _has_results(path)):
        return
    foreign = sorted({entry.name for entry in path.iterdir()} - {LOCK, LAUNCHER, f".{IDENTITY}.tmp"})
    if foreign:
        what = f"is not a run directory (no {IDENTITY}, and no {CONFIG} beside results of a run) but holds "
        raise InputError(str(path), what + ", ".join(foreign[:5]), f"restore {IDENTITY} if it was one, or {FIX}")


def _acquire_lock(path: Path) -> int:
    """Takes the directory's lock without waiting; returns its descriptor, which garbage collection never closes."""
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 256, 0).decode().strip() or "a process that just started"
        os.close(lock)
        fix = "wait for it, stop it, or choose a different run.name"
        raise InputError(str(path), f"is in use by {holder}", fix) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return lock


def _refuse_other(path: Path, wanted: dict[str, Any]) -> None:
    """Refuses a directory with results of another experiment than `wanted`, an identity as JSON returns it."""
    if not _has_results(path):
        return
    existing, file = _identity(path)
    # Settings that a later release has added had their defaults.
    existing = {name: value for name, value in defaults().items() if name in wanted} | existing
    differing = [key for key in sorted({*wanted, *existing}) if _shown(wanted, key) != _shown(existing, key)]
    if differing:
        lines = [f"  {key}: {_shown(existing, key)} there, {_shown(wanted, key)} now" for key in differing]
        what = "\n".join([f"belongs to another experiment (its {file}):", *lines])
        raise InputError(str(path), what, FIX + FORK)


def has_checkpoints(path: Path) -> bool:
    """Whether a checkpoint was finished in the run directory, even if it was damaged since."""
    folder = path / CHECKPOINTS
    return folder.is_dir() and any(not entry.name.startswith(".") for entry in folder.iterdir())


def _has_results(path: Path) -> bool:
    """Whether a training step was recorded, or a checkpoint finished."""
    for metrics in path.glob("*.jsonl"):
        try:
            # Step 0 is the evaluation before the first step.
            if metrics.is_file() and any(record["step"] > 0 for record in read_metrics(metrics)):
                return True
        except ValueError:
            # An unreadable file may hold steps, which must not be overwritten.
            return True
    return has_checkpoints(path)


def _identity(path: Path) -> tuple[dict[str, Any], str]:
    """The identity of the experiment in the directory, and its file: run.json, else config.yaml."""
    try:
        content = json.loads((path / IDENTITY).read_bytes())
        if not isinstance(content, dict):
            raise ValueError("not an object")
        return must_stay(content), IDENTITY
    except (OSError, ValueError) as lost:
        try:
            return identity_in((path / CONFIG).read_text()), CONFIG
        except (OSError, ValueError) as error:
            raise InputError(
                str(path),
                f"holds results of an unknown experiment: {path / IDENTITY} cannot be read ({lost}), "
                f"nor {CONFIG} ({error})",
                "restore one of them, or take only the weights of a checkpoint with run.init_from",
            ) from None


def _shown(identity: dict[str, Any], key: str) -> str:
    return json.dumps(identity[key], sort_keys=True) if key in identity else "absent"


@contextmanager
def naming(files: str) -> Iterator[None]:
    """Context in which these files are read.

    Raises:
        InputError: Their content has another shape than the body expects.
    """
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        what = f"damaged, or of another version: {error!r}"
        raise InputError(files, what, "restore it, or use the version that wrote it") from error
