"""A real HTTP server that scores, and misbehaves as its path says; used by the tests of services."""

from __future__ import annotations

import base64
import html
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, quote_plus


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
        elif kind.startswith("spells-"):
            spelled = SPELLINGS[kind.removeprefix("spells-")](key)
            self.answer(401, json.dumps({"error": f"no such key: <{spelled}>"}).encode())
        elif kind in MALFORMED:
            self.wfile.write(MALFORMED[kind])
            self.close_connection = True
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


def chat(reply: str, **end: str | None) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": reply}, **end}]}


def base64_of(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


SPELLINGS: dict[str, Callable[[str], str]] = {
    "plain": str,
    "bearer": lambda key: f"Bearer {key}",
    "url": lambda key: quote(key, safe=""),
    "form": quote_plus,
    "all-url": lambda key: "".join(f"%{ord(sign):02x}" for sign in key),
    "html": html.escape,
    "html-twice": lambda key: html.escape(html.escape(key)),
    "all-html": lambda key: "".join(f"&#{ord(sign)};" for sign in key),
    "all-html-hex": lambda key: "".join(f"&#x{ord(sign):04X};" for sign in key),
    "html-names": lambda key: key.replace("&", "&amp;").replace("+", "&plus;").replace("/", "&sol;"),
    "base64": base64_of,
    "base64-bearer": lambda key: base64_of(f"Bearer {key}"),
    "base64-user": lambda key: base64_of(f"me:{key}"),
    "base64-within": lambda key: base64_of(f"Authorization: Bearer {key}\r\nHost: x"),
    "base64-url": lambda key: base64.urlsafe_b64encode(key.encode()).decode(),
    "base64-lines": lambda key: base64.encodebytes(f"Authorization: Bearer {key}".encode()).decode(),
    "url-base64": lambda key: quote(base64_of(key), safe=""),
}
"""Name -> how an answer writes a key."""
OK, CHUNKED = b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
MALFORMED = {
    "negative-chunk": CHUNKED + b"-5\r\nabc\r\n0\r\n\r\n",
    "chunk-to-the-end": CHUNKED + b'-1\r\n{"verdicts": [1.0, 1.0]}',
    "very-negative-chunk": CHUNKED + b"-" + b"f" * 40 + b"\r\nabc",
    "huge-chunk": CHUNKED + b"f" * 5000 + b"\r\nabc",
    "chunk-without-size": CHUNKED + b"many\r\nabc",
    "chunk-with-a-long-size": CHUNKED + b"0" * 100_000,
    "trailer": CHUNKED + b"0\r\n" + b"x" * 100_000,
    "negative-length": OK + b"Content-Length: -7\r\n\r\n{",
    "huge-length": OK + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n{",
    "length-in-words": OK + b"Content-Length: seven\r\n\r\n{",
    "no-header": OK + b"\xff\x00 no header\r\n: none\r\n\r\n{",
    "many-headers": OK + b"X: y\r\n" * 1000 + b"\r\n{",
    "long-header": OK + b"X: " + b"y" * 100_000 + b"\r\n\r\n{",
    "many-continues": b"HTTP/1.1 100 Continue\r\n\r\n" * 1000,
    "switches": b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
    "no-status": b"HTTP/1.1 fine\r\n\r\n{",
    "negative-status": b"HTTP/1.1 -200 OK\r\n\r\n{",
    "other-protocol": b"\x16\x03\x01\x00\xff\r\n\r\n",
    "nothing": b"",
    "huge-number": OK + b"\r\n[" + b"9" * 5000 + b"]",
}
"""Name -> what a server sends that is no answer."""


def echo(before: str, after: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A judge that quotes what it was asked, without the rubric's first line."""
    return lambda request: chat(before + request["messages"][0]["content"].partition("\n")[2] + after)


def marked(request: dict[str, Any]) -> dict[str, Any]:
    """A judge that writes its score behind the mark that the rubric's first line ends with, then adds nothing."""
    first, _, rest = request["messages"][0]["content"].partition("\n")
    return chat(f"{rest}\n{first.split()[-1]} Score: 2", finish_reason="stop")


def judged(request: dict[str, Any]) -> dict[str, Any]:
    """A judge that counts letters of what it was asked."""
    (message,) = request["messages"]
    return chat(f"It is fine. Score: 1, no.\nScore: {message['content'].count('!')}")


ANSWERS = {
    "judge": judged,
    "quotes": echo("The student writes:\n", ""),
    "quotes-last": echo("Score: 2\nThe student wrote:\n", ""),
    "quotes-first": echo("The student writes:\n", "\nScore: 2"),
    "marks": marked,
    "stop": lambda request: chat("Score: 3", finish_reason="stop"),
    "unsaid": lambda request: chat("Score: 3", finish_reason=None),
    "length": lambda request: chat("It is right.\nScore: 1", finish_reason="length"),
    "content_filter": lambda request: chat("Score: 5", finish_reason="content_filter"),
    "abort": lambda request: chat("Score: 5", finish_reason="abort"),
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
