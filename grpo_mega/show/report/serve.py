"""Serves the page about runs, to this machine alone; an open page shows new steps by itself.

Whoever can reach the address could read the run, so the server listens on 127.0.0.1, answers under an address that
holds a secret, and only to browsers that name this machine: a page of another site that has its name resolve to
127.0.0.1 gets nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from grpo_mega.observe.alarm_log import ALARMS_FILE
from grpo_mega.observe.foreign import printable, tell
from grpo_mega.show.report.pack import pack
from grpo_mega.show.report.page import page_of, title_of
from grpo_mega.show.report.read import OF_A_RUN, STAGES, read_run

LOOPBACK = "127.0.0.1"
SECONDS_TO_ASK, SECONDS_TO_READ = 10.0, 60.0
"""Seconds that a connection may take to send its request, and to read the answer."""
MOST_CONNECTIONS = 32
"""Largest number of connections at once. A further one replaces the one that has been silent longest."""
PATH = re.compile(r"/(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2}){0,2000}")
"""What may stand in a request: a path of RFC 3986 with its query."""


class Server(ThreadingHTTPServer):
    """Answers under `address` with the page about these runs, and under `address`data with their newest numbers.

    Raises:
        InputError: A folder is not a run directory.
        OSError: The port is taken.
    """

    daemon_threads = True
    # Connections that are not accepted yet; beyond that number the system lets browsers wait.
    request_queue_size = 128

    def __init__(self, paths: Sequence[Path], port: int = 0) -> None:
        self._paths = [*paths]
        self._lock = threading.Lock()
        self._version, self._data, self._title = "", b"", ""
        self._connections = threading.Lock()
        # Connection -> time by which it must have asked, the oldest first.
        self._asking: dict[Any, float] = {}
        self._answered: set[Any] = set()
        # Read before the port is taken, so that a folder without a run is an error at once.
        self.newest()
        super().__init__((LOOPBACK, port), _Handler)
        self.secret = secrets.token_urlsafe(16)

    @property
    def address(self) -> str:
        """The address to open in a browser."""
        return f"http://{LOOPBACK}:{self.server_port}/{self.secret}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers a connection in a thread, or closes it while `MOST_CONNECTIONS` others are being answered."""
        with self._connections:
            if len(self._asking) + len(self._answered) >= MOST_CONNECTIONS and self._asking:
                self._end(next(iter(self._asking)))
            full = len(self._answered) >= MOST_CONNECTIONS
            if not full:
                self._asking[request] = time.monotonic() + SECONDS_TO_ASK
        if full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Ends connections that take too long to ask; called twice a second."""
        with self._connections:
            for request in [one for one, until in self._asking.items() if until < time.monotonic()]:
                self._end(request)

    def _end(self, request: Any) -> None:
        """Ends a connection; its thread then reads the end of the stream."""
        self._asking.pop(request, None)
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def has_asked(self, request: Any) -> bool:
        """Counts a connection among those that are answered; returns whether it has not been ended meanwhile."""
        with self._connections:
            if in_time := self._asking.pop(request, None) is not None:
                self._answered.add(request)
            return in_time

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection that is over."""
        with self._connections:
            self._asking.pop(request, None)
            self._answered.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints an error in a line, but nothing of a browser that has gone."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            tell(f"error: {error!r}", sys.stderr)

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
        # A file may be absent, or links may form a circle.
        with suppress(OSError):
            entry = file.stat()
            found.append(f"{file} {entry.st_size} {entry.st_mtime_ns}")
    return hashlib.sha256("\n".join(found).encode(errors="backslashreplace")).hexdigest()[:16]


class _Handler(BaseHTTPRequestHandler):
    """Answers GET requests for the page and for its data, and nothing else."""

    server: Server
    server_version, sys_version = "grpo_mega", ""
    timeout = SECONDS_TO_READ

    def do_GET(self) -> None:
        if not self.server.has_asked(self.connection):
            return
        # A page of another site whose name resolves to 127.0.0.1 reaches this server, but the browser sends that site's
        # name.
        host = self.headers.get("Host")
        if host not in {f"{name}:{self.server.server_port}" for name in (LOOPBACK, "localhost")}:
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        asked = self.path.removeprefix(f"http://{host}")
        if not PATH.fullmatch(asked):
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        path, _, query = asked.partition("?")
        secret, _, what = path.removeprefix("/").partition("/")
        # Compared in constant time, which tells nothing of how much of a guess is right.
        if not secrets.compare_digest(secret.encode(), self.server.secret.encode()) or what not in {"", "data"}:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            version, data, title = self.server.newest()
        # The run directory may have been removed, for example; the page says it.
        except Exception as error:
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, printable(str(error)).encode(), "text/plain")
            return
        if not what:
            self._answer(HTTPStatus.OK, page_of(title, json.loads(data), live=True).encode(), "text/html")
        elif parse_qs(query).get("since") == [version]:
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
