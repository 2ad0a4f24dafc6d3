"""Writes the data of `pack` as one HTML file that needs nothing else: no network, no server, no other file."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import logging
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_mega.observe.foreign import printable
from grpo_mega.observe.recorder import Observer
from grpo_mega.observe.run_dir import REPORT
from grpo_mega.platform.files import write_atomic
from grpo_mega.platform.orphans import start_beside
from grpo_mega.show.report.pack import Packed, pack
from grpo_mega.show.report.read import RunData, read_run

PARTS = Path(__file__).resolve().parent / "page"
SCRIPTS = ("dom.js", "advantage.js", "curves.js", "tokens.js", "explorer.js", "sections.js", "machines.js", "page.js")
"""Files of the page's script, in the order in which they run."""
LOG = Path("logs") / "report.log"
"""Log file in the run directory, which says why a page was not written."""
LIVE = "live.js"
"""The last file of the script of a page that is served."""

logger = logging.getLogger(__name__)


def write_report(runs: Sequence[RunData], path: Path) -> None:
    """Writes the page about these runs, atomically."""
    write_atomic(path, page_of(title_of(runs), pack(runs)))


def title_of(runs: Sequence[RunData]) -> str:
    """The title of the page."""
    return f"{printable(runs[0].name)}: report" if len(runs) == 1 else f"{len(runs)} runs compared"


def write_own_report(run_dir_path: Path) -> None:
    """Writes report.html into a run directory at the end of its run; a failure is only a warning."""
    try:
        run = read_run(run_dir_path)
        write_report([run], run_dir_path / REPORT)
    # The results of the run are safe, whatever fails here, and tools/report.py can try again.
    except Exception as error:
        logger.warning(
            "%s is not written: %s; python tools/report.py %s tries again", run_dir_path / REPORT, error, run_dir_path
        )


def page_of(title: str, data: Packed, live: bool = False) -> str:
    """The HTML of the page; only its own scripts run in it, whatever the data say.

    A `live` page asks its server for newer data (`serve`); any other page makes no request.
    """
    scripts = (*SCRIPTS, *([LIVE] if live else []))
    library, own = _part("uPlot.iife.min.js"), "\n".join(["'use strict';", *(_part(name) for name in scripts)])
    # The policy names each script by its hash, so that nothing in the data can run. The license stands in an HTML
    # comment, which "--" would end.
    parts = {
        "TITLE": html.escape(title),
        "POLICY": "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src {_hash(library)} {_hash(own)}" + ("; connect-src 'self'" if live else ""),
        "LICENSE": html.escape(_part("uPlot.LICENSE")).replace("--", "- -"),
        "STYLE": _part("uPlot.min.css") + _part("page.css"),
        "LIBRARY": library,
        "SCRIPT": own,
        "DATA": in_script(data),
    }
    # Text and names of parts in turn; a single split, so that a name inside the data is never replaced.
    pieces = _part("page.html").split("@@")
    return "".join(parts[piece] if index % 2 else piece for index, piece in enumerate(pieces))


def in_script(data: Packed) -> str:
    """JSON for a script element: ASCII, without any character that could begin a tag or a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _part(name: str) -> str:
    return (PARTS / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


class BackgroundReport(Observer):
    """Writes the page about a live run every so many steps, in another process: no step waits for it."""

    def __init__(self, path: Path, every: int) -> None:
        """Prepares to write the page of the run in `path`, every so many steps; 0 for never."""
        self._path, self._every = path, every
        self._writer: subprocess.Popen[bytes] | None = None

    def stage(self, name: str, step: int, steps: int) -> None:
        """Replaces the page of an earlier start, which may show steps after the checkpoint."""
        page = self._path / REPORT
        existed = page.exists()
        page.unlink(missing_ok=True)
        if self._every and existed:
            self._write()

    def step(self, step: int, metrics: dict[str, float], shown: Sequence[dict[str, Any]]) -> None:
        """Starts to write the page when due."""
        if self._every and step % self._every == 0:
            self._write()

    def _write(self) -> None:
        # On a slow disk the last one may still be under way.
        if self._writer and self._writer.poll() is None:
            return
        self._writer = start_beside("grpo_mega.show.report", [self._path], self._path / LOG)

    def finish(self, summary: dict[str, Any]) -> None:
        """Stops writing: this page would be older than the one that the end of the run writes."""
        self.close()

    def close(self) -> None:
        """Stops writing."""
        if self._writer:
            self._writer.kill()
            self._writer.wait()
            self._writer = None
