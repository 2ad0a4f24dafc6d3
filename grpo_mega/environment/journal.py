"""Journal: what a run's environment said, on disk before it is used.

A run that is stopped or killed generates its last steps again, and gets the recorded openings, replies and rewards. So
it goes on bit for bit even if the environment is not a function of its calls: a clock, a server, a search engine.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

logger = logging.getLogger(__name__)

FOLDER = "replies"
"""Folder of the run directory: a folder for each step, with a file for each rank."""


class Journal:
    """Replies that a rank records, and finds again after a new start with any number of ranks. Threads may share it."""

    def __init__(self, folder: Path, rank: int) -> None:
        """A journal in `folder`, which is created with the first step."""
        self._folder, self._rank, self._saved = folder, rank, 0
        # Only the first steps of a start have earlier replies: looking for them in every step would cost each of a
        # large job's ranks as many files as there are ranks.
        self._earlier = {path.name for path in folder.glob("step-*")}
        self._step: int | None = None
        self._found: dict[str, Any] = {}
        self._file: BinaryIO | None = None
        self._lock = threading.Lock()
        self._unsynced = False

    def begin(self, step: int, saved: int) -> None:
        """From now on, replies belong to the step after `step` ones; a checkpoint has the first `saved` steps."""
        if step == self._step:
            return
        self.close()
        self._step, self._found = step, {}
        if self._rank == 0 and saved > self._saved:
            for path in self._folder.glob("step-*"):
                if int(path.name.removeprefix("step-")) < saved:
                    shutil.rmtree(path, ignore_errors=True)
            self._saved = saved
        folder = self._folder / f"step-{step:06d}"
        for path in sorted(folder.iterdir()) if folder.name in self._earlier else ():
            for line in path.read_bytes().split(b"\n"):
                # What a kill cut off was never used.
                with suppress(ValueError):
                    key, value = json.loads(line)
                    self._found[key] = value
        if self._found:
            logger.info("%d replies in %s are used again; remove it to ask once more", len(self._found), folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"rank-{self._rank:05d}.jsonl").open("ab")

    def get(self, key: str) -> tuple[Any] | None:
        """The value recorded in this step, in a tuple; None if there is none."""
        return (self._found[key],) if key in self._found else None

    def put(self, key: str, value: Any) -> None:
        """Records a JSON value, which must not be used before `sync`."""
        # The line begins with its end: after a kill in the middle of the last line, a new one is needed.
        line = b"\n" + json.dumps([key, value]).encode()
        with self._lock:
            if self._file is None:
                return
            self._found[key] = value
            self._file.write(line)
            self._unsynced = True

    def sync(self) -> None:
        """Returns when all that was put is on disk. Once for many values, as a network's disk takes its time."""
        with self._lock:
            if self._file and self._unsynced:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._unsynced = False

    def close(self) -> None:
        """Closes the file; what is put afterwards is not recorded."""
        with self._lock:
            if self._file:
                self._file.close()
            self._file = None
