"""Serves the page about runs, to this machine alone; an open page shows new steps by itself.

Whoever can reach the address could read the run, so the server listens on 127.0.0.1, answers under an address that
holds a secret, and only to browsers that name this machine: a page of another site that has its name resolve to
127.0.0.1 gets nothing.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from grpo_mega.observe.alarm_log import ALARMS_FILE
from grpo_mega.report.pack import pack
from grpo_mega.report.page import page_of, title_of
from grpo_mega.report.read import OF_A_RUN, STAGES, read_run

LOOPBACK = "127.0.0.1"


class Server(ThreadingHTTPServer):
    """Answers under `address` with the page about these runs, and under `address`data with their newest numbers.

    Raises:
        ValueError: A folder is no run directory.
        OSError: The port is taken.
    """

    daemon_threads = True

    def __init__(self, paths: Sequence[Path], port: int = 0) -> None:
        self._paths = [*paths]
        self._lock = threading.Lock()
        self._version, self._data, self._title = "", b"", ""
        self.newest()
        super().__init__((LOOPBACK, port), _Handler)
        self.secret = secrets.token_urlsafe(16)

    @property
    def address(self) -> str:
        """The address to open in a browser."""
        return f"http://{LOOPBACK}:{self.server_port}/{self.secret}/"

    def newest(self) -> tuple[str, bytes, str]:
        """The version of the run directories, what the page shows of them as JSON, and the page's title.

        They are read again only when one of their files has changed.
        """
        with self._lock:
            version = version_of(self._paths)
            if version != self._version:
                runs = [read_run(path) for path in self._paths]
                packed = pack(runs) | {"version": version}
                self._data = json.dumps(packed, allow_nan=False, separators=(",", ":")).encode()
                self._title, self._version = title_of(runs), version
            return self._version, self._data, self._title


def version_of(paths: Sequence[Path]) -> str:
    """A text that changes when a run records something. It looks at few files, as a page asks every two seconds."""
    names = (*OF_A_RUN, ALARMS_FILE, *(f"{stage}.jsonl" for stage in STAGES), "samples")
    found = []
    for file in (path / name for path in paths for name in names):
        with suppress(FileNotFoundError):
            entry = file.stat()
            found.append(f"{file} {entry.st_size} {entry.st_mtime_ns}")
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]


class _Handler(BaseHTTPRequestHandler):
    """Answers GET of the page and of its data; everything else is not there."""

    server: Server
    server_version, sys_version = "grpo_mega", ""

    def do_GET(self) -> None:
        if self.headers.get("Host") not in {f"{name}:{self.server.server_port}" for name in (LOOPBACK, "localhost")}:
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        asked = urlsplit(self.path)
        secret, _, what = asked.path.removeprefix("/").partition("/")
        if not secrets.compare_digest(secret.encode(), self.server.secret.encode()) or what not in {"", "data"}:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            version, data, title = self.server.newest()
        except Exception as error:  # such as a run directory that was removed; the page says it
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, str(error).encode(), "text/plain")
            return
        if not what:
            self._answer(HTTPStatus.OK, page_of(title, json.loads(data), live=True).encode(), "text/html")
        elif parse_qs(asked.query).get("since") == [version]:
            self._answer(HTTPStatus.NO_CONTENT, b"", "application/json")
        else:
            self._answer(HTTPStatus.OK, data, "application/json")

    def _answer(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body)), "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff",
        }  # fmt: skip
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Logs nothing, as a page asks every few seconds."""
