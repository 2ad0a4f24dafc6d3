"""Writes log records, warnings and uncaught exceptions of every rank to logs/rank-N.log."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

logger = logging.getLogger(__name__)

LIBRARIES = ("megatron", "torch", "torch.distributed")
"""Verbose loggers: only their warnings and errors are kept, and only in the file."""

FILE_ONLY = (*LIBRARIES, "py.warnings", "uncaught")
"""Loggers whose records stay out of the terminal; Python prints uncaught exceptions there itself."""
TAIL = 1 << 20
"""Bytes at the end of a log that are searched for its last error."""
ENDS = "this rank ends: "
"""Beginning of the record of the error that ends a rank."""


def last_error(run: Path) -> str:
    """First line of the error that ended the main rank's newest start; empty if that did not end with an error."""
    log = run / "logs" / "rank-0.log"
    # Opening a pipe would wait for its writer.
    if not log.is_file():
        return ""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    _, ended, rest = text.rpartition(f" CRITICAL uncaught: {ENDS}")
    # Later records are those of a newer start, which has not ended with this error.
    newer_start = re.search(r" rank 0 [A-Z]+ ", rest)
    return rest.partition("\n")[0] if ended and not newer_start else ""


def setup_rank_logging(path: Path, rank: int) -> None:
    """Sends this process' log records to logs/rank-N.log of the run directory `path`; called once, early.

    Rank 0's warnings and errors go to stderr as well. The run directory must have been opened by rank 0 before.
    """
    folder = path / "logs"
    folder.mkdir(exist_ok=True)
    file = logging.FileHandler(folder / f"rank-{rank}.log", encoding="utf-8", errors="backslashreplace")
    file.setFormatter(logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s"))
    handlers: list[logging.Handler] = [file]
    if rank == 0:
        terminal = _ToStderr()
        terminal.setLevel(logging.WARNING)
        terminal.addFilter(lambda record: not record.name.startswith(FILE_ONLY))
        terminal.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        handlers.append(terminal)
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    logging.captureWarnings(True)
    for name in LIBRARIES:
        library = logging.getLogger(name)
        # torch installs handlers that print.
        library.handlers.clear()
        library.propagate = True
        library.setLevel(logging.WARNING)
    sys.excepthook = _log_and_print
    threading.excepthook = _log_and_print_thread


class OnlyShows:
    """Guards what only shows a run, and must not end it: `with only_shows("samples/"): ...`.

    An error is logged with its traceback, and the run goes on. The body must not contain a collective: a rank that
    leaves it early would let the others wait.
    """

    def __init__(self) -> None:
        self._logged = set[tuple[str, type[Exception]]]()

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Ends the body at an error, and logs the first error of each type in `what`: more would come every step."""
        try:
            yield
        except Exception as error:
            kind = what, type(error)
            if kind not in self._logged:
                self._logged.add(kind)
                name = type(error).__name__
                logger.warning("%s: %s: %s; the run goes on without it", what, name, error, exc_info=True)


class _ToStderr(logging.StreamHandler[Any]):
    """Writes to the current `sys.stderr`, which the console replaces while its panel is drawn."""

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        """Ignores the stream that `StreamHandler` is given."""


def _log_and_print(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("uncaught").critical("uncaught exception", exc_info=(kind, error, trace))
    sys.__excepthook__(kind, error, trace)


def _log_and_print_thread(args: threading.ExceptHookArgs) -> None:
    where = args.thread.name if args.thread else "a thread"
    error = args.exc_value or args.exc_type()
    logging.getLogger("uncaught").critical("in %s", where, exc_info=(args.exc_type, error, args.exc_traceback))
    threading.__excepthook__(args)
