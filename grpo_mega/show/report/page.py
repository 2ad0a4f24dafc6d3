"""Puts the data of `pack` into one HTML file that needs nothing else: no network, no server, no other file."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from grpo_mega.observe.foreign import printable
from grpo_mega.observe.run_dir import REPORT
from grpo_mega.platform.files import write_atomic
from grpo_mega.show.report.pack import Packed, pack
from grpo_mega.show.report.read import RunData, read_run

PARTS = Path(__file__).resolve().parent / "page"
SCRIPTS = ("dom.js", "advantage.js", "curves.js", "tokens.js", "explorer.js", "sections.js", "machines.js", "page.js")
"""Files of the page's script, in the order in which they run."""
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
    except Exception as error:  # the results are safe, and tools/report.py shows the error
        logger.warning(
            "%s is not written: %s; python tools/report.py %s tries again", run_dir_path / REPORT, error, run_dir_path
        )


def page_of(title: str, data: Packed, live: bool = False) -> str:
    """The HTML of the page; only scripts of this page run in it, whatever the data say.

    One that is `live` asks where it comes from for newer data (`serve`); any other asks nobody for anything.
    """
    scripts = (*SCRIPTS, *([LIVE] if live else []))
    library, own = _part("uPlot.iife.min.js"), "\n".join(["'use strict';", *(_part(name) for name in scripts)])
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
    pieces = _part("page.html").split("@@")  # text and names of parts in turn: no part is searched for others
    return "".join(parts[piece] if index % 2 else piece for index, piece in enumerate(pieces))


def in_script(data: Packed) -> str:
    """JSON that may stand in a script element: ASCII, without a character that could begin a tag or a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _part(name: str) -> str:
    return (PARTS / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
