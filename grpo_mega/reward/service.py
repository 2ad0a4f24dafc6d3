"""HTTP client for scoring services: JSON requests with a time limit, repeated while there is no answer."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, TypeVar
from urllib.parse import urlsplit

from grpo_mega.platform.trace import span

MOST_BYTES = 64 << 20
"""Largest answer that is read, in bytes."""
LONGEST_PAUSE = 30.0
"""Longest pause before a request is repeated, in seconds."""
TRY_LATER = (408, 425, 429)
"""Status codes below 500 that refuse a request only temporarily."""
TOO_MUCH = (400, 413, 422)
"""Status codes that refuse the content of one request, e.g. a text longer than the model's context."""
GIVEN_UP_AFTER = 8
"""Number of consecutive unanswered requests, after all their retries, from which on no more are sent."""
SHOWN_CHARACTERS = 300
"""Number of leading characters of an answer shown in an error."""
HIDDEN = b"[hidden]"
"""Text shown in place of a secret."""
SHORTEST_SECRET = 6
"""Shortest key that is hidden, in characters. Local services get shorter ones, such as "none", which answers may
contain."""

T = TypeVar("T")


class Away(Exception):
    """Error: a service has not answered; the message says what happened."""


class Refused(ValueError):
    """Error: a service refuses the content of one request but may answer others; the message has its answer."""


@dataclass
class Service:
    """A service with its limits and retries, shared by threads.

    Attributes:
        url: Where requests go; proxies of the environment are not used.
        seconds: Time limit for one attempt, from connecting to the last byte.
        retries: Further attempts after one that got no answer.
        backoff: Seconds before the first retry; doubled for each further one.
        headers: Sent with each request.
        secret: A text in the headers that is never shown, even if an answer repeats it; "" for none.
        lost: Number of consecutive unanswered requests, over all calls of a step.
        lost_at: Time (`time.monotonic`) at which the last of them was given up.
        away: Set while no requests are sent, which ends the pauses of other threads.
    """

    url: str
    seconds: float
    retries: int
    backoff: float
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    secret: str = field(default="", repr=False)
    lost: int = 0
    lost_at: float = 0.0
    away: threading.Event = field(default_factory=threading.Event, repr=False)

    def __post_init__(self) -> None:
        """Raises ValueError when a header's value is not printable ASCII; the message never shows it."""
        for name, value in self.headers.items():
            if not (value.isascii() and value.isprintable()):
                raise ValueError(f"{self.url}: the value of the header {name} is not printable ASCII")

    def ask(self, request: Any, read: Callable[[Any], T]) -> T:
        """Sends a request and returns `read` of the JSON answer.

        Raises:
            Away: No attempt was answered, or too many earlier requests were not.
            Refused: The service refuses the content of this request.
            ValueError: The service refuses every request, or `read` refuses the answer.
        """
        content = json.dumps(request).encode()
        for attempt in range(self.retries + 1):
            if self._given_up():
                raise Away(f"{self.url} was given up after {self.lost} requests without an answer")
            try:
                with span("request"):
                    answer = self._attempt(content)
            except Away as away:
                if attempt == self.retries:
                    self._lose()
                    tries = f" ({attempt + 1} attempts)" if attempt else ""
                    raise Away(f"{self.url}: {away}{tries}") from None
                self.away.wait(min(self.backoff * 2**attempt, LONGEST_PAUSE))
            else:
                self.lost = 0
                self.away.clear()
                return read(answer)
        raise AssertionError("unreachable")

    def _lose(self) -> None:
        """Counts an unanswered request."""
        self.lost, self.lost_at = self.lost + 1, time.monotonic()
        if self.lost >= GIVEN_UP_AFTER:
            self.away.set()

    def _given_up(self) -> bool:
        """Whether requests are suspended, because too many were lost within the time that one may take."""
        if self.away.is_set() and time.monotonic() > self.lost_at + self.seconds * (self.retries + 1):
            self.lost = 0
            self.away.clear()
        return self.away.is_set()

    def _attempt(self, content: bytes) -> Any:
        try:
            status, answer = post(self.url, content, self.headers, self.seconds)
        except (OSError, HTTPException) as error:  # its text may be what the service sent
            cause = f"{type(error).__name__}: {error}".encode(errors="replace")
            raise Away(self._without_secret(cause).decode()) from None
        except ValueError:  # an http.client error, whose text may quote a header and so the key
            raise ValueError(f"{self.url} cannot be asked: its url or headers are no HTTP") from None
        answer = self._without_secret(answer)
        words = f"answered {status}: {answer[: 4 * SHOWN_CHARACTERS].decode(errors='replace')[:SHOWN_CHARACTERS]!r}"
        if status >= 500 or status in TRY_LATER:
            raise Away(words)
        if status in TOO_MUCH:
            raise Refused(f"{self.url} {words}")
        if status != 200:
            raise ValueError(f"{self.url} {words}")
        try:
            return json.loads(answer)
        except (ValueError, RecursionError):
            raise Away(f"{words}, which is no JSON") from None

    def _without_secret(self, text: bytes) -> bytes:
        """The text with the secret replaced by `HIDDEN`, however JSON escapes it; call it before cutting the text."""
        if len(self.secret) < SHORTEST_SECRET:
            return text
        signs = (rf"(?:\\?{re.escape(sign)}|\\u{ord(sign):04x})" for sign in self.secret)
        return re.sub("".join(signs).encode(), HIDDEN, text, flags=re.IGNORECASE)


def post(url: str, content: bytes, headers: dict[str, str], seconds: float) -> tuple[int, bytes]:
    """Sends JSON by POST; returns the status and at most `MOST_BYTES` of the answer.

    Raises:
        TimeoutError: The request took longer than `seconds`, even if bytes kept arriving.
        OSError, HTTPException: The answer is missing or incomplete.
    """
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=seconds)
    late = threading.Event()
    watch = None
    try:
        connection.connect()
        watch = threading.Timer(seconds, _end, [connection.sock, late])
        watch.daemon = True
        watch.start()
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("POST", path, content, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        answer = response.read(MOST_BYTES)
        if late.is_set():
            raise TimeoutError
        return response.status, answer
    except (OSError, HTTPException) as error:
        if late.is_set() or isinstance(error, TimeoutError):
            raise TimeoutError(f"no answer within reward.timeout_seconds={seconds:g}") from None
        raise
    finally:
        if watch:
            watch.cancel()
        connection.close()


def _end(connection: socket.socket, late: threading.Event) -> None:
    """Shuts down a connection that takes too long, which wakes the thread reading from it."""
    late.set()
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
