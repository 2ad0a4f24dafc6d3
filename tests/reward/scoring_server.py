"""A real HTTP server that scores, and misbehaves as its path says; used by the tests of services."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    """Keeps what it was asked, and can be told to end what hangs."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.calls: Counter[str] = Counter()
        self.over = threading.Event()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: object) -> None:
        """Clients that went away are no news."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        """Prints nothing."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = self.path.split("/")[1].partition("?")[0]
        with self.server.lock:
            self.server.asked.append(request)
            self.server.headers.append(dict(self.headers))
            self.server.calls[kind] += 1
            call = self.server.calls[kind]
        key = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if kind == "hangs":
            self.server.over.wait()
        elif kind == "drips":
            self.drip()
        elif kind == "closes":
            self.connection.close()
        elif kind == "garbage":
            self.answer(200, b"<html>welcome</html>")
        elif kind == "deep":
            self.answer(200, b"[" * 100_000)
        elif kind == "cut":
            self.answer(200, b'{"verdicts": [1.0', promised=500)
        elif kind == "busy" and call <= 2:
            self.answer(503 if call == 1 else 429, b"later")
        elif kind == "moody" and call % 2:
            self.answer(500, f"no answer for {key}".encode())
        elif kind == "moody" and call % 8 == 0:
            self.answer(200, json.dumps(chat("I cannot say.")).encode())
        elif kind == "alternates" and call % 2:
            self.answer(500, b"no")
        elif kind.startswith("echoes"):
            status = int(kind.removeprefix("echoes"))
            words = {"error": {"message": f"Incorrect API key provided: {key}.", "escaped": f"<{key}>"}}
            self.answer(status, json.dumps(words).replace("/", "\\/").replace("+", "\\u002B").encode())
        elif kind == "protocol":
            self.wfile.write(f"no HTTP, {key}\r\n\r\n".encode())
        elif kind == "tells":
            self.answer(200, json.dumps(chat(f"You are {key}.\nScore: 3")).encode())
        elif kind.isdecimal():
            self.answer(int(kind), b"no")
        else:
            self.answer(200, json.dumps(ANSWERS.get(kind, verdicts)(request)).encode())

    def answer(self, status: int, content: bytes, promised: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(promised or len(content)))
        self.end_headers()
        self.wfile.write(content)

    def drip(self) -> None:
        """One byte after the other, so that no single read takes long."""
        self.send_response(200)
        self.end_headers()
        while not self.server.over.wait(0.05):
            self.wfile.write(b" ")


def verdicts(request: dict[str, Any]) -> dict[str, Any]:
    """A value and a reason for each sample: the length of its completion."""
    return {
        "verdicts": [{"value": len(s["completion"]), "reason": f"for {s['completion']}"} for s in request["samples"]]
    }


def chat(reply: str) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": reply}}]}


def judged(request: dict[str, Any]) -> dict[str, Any]:
    """A judge that counts letters of what it was asked."""
    (message,) = request["messages"]
    return chat(f"It is fine. Score: 1, no.\nScore: {message['content'].count('!')}")


ANSWERS = {
    "judge": judged,
    "moody": judged,
    "mute": lambda request: chat("I cannot say."),
    "harsh": lambda request: chat("Score: -3"),
    "wordy": lambda request: chat("." * 3000 + "\nScore: 7"),
    "null": lambda request: {"choices": [{"message": {"role": "assistant", "content": None}}]},
    "lone": lambda request: chat("\ud800\nScore: 4"),
    "odd": lambda request: {"choices": []},
    "short": lambda request: {"verdicts": [1.0]},
    "bare": lambda request: {"verdicts": [0.5] * len(request["samples"])},
    "nan": lambda request: {"verdicts": [float("nan")] * len(request["samples"])},
    "refuses": lambda request: {"verdicts": [{"unscorable": "no tests"} for _ in request["samples"]]},
    "list": lambda request: [1.0] * len(request["samples"]),
}


@contextmanager
def serving() -> Iterator[Server]:
    """A server, for as long as the context lasts."""
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        thread.join()
        server.server_close()
