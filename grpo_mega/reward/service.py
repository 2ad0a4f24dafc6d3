"""Requests to services that score: JSON by HTTP, within a time limit, repeated while there is no answer."""

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
"""Longest answer that is read."""
LONGEST_PAUSE = 30.0
"""Seconds, at most, before a request is repeated."""
TRY_LATER = (408, 425, 429)
"""Answers that refuse a request only for now, besides those from 500 on."""
TOO_MUCH = (400, 413, 422)
"""Answers that refuse what one request holds, such as a text that is longer than the model's context."""
GIVEN_UP_AFTER = 8
"""Requests in a row that got no answer, however often they were repeated; then the others are not even sent."""
SHOWN_CHARACTERS = 300
"""Of an answer, the first ones, that an error shows."""
HIDDEN = b"[hidden]"
"""What is shown for a secret."""
SHORTEST_SECRET = 6
"""Characters of a key that is hidden. Local services get shorter ones, such as "none", which answers may well hold."""

T = TypeVar("T")


class Away(Exception):
    """A service has not answered; the message says what happened."""


class Refused(ValueError):
    """A service refuses what one request holds, and may well answer others; the message says what it answered."""


@dataclass
class Service:
    """A service, and how patient its callers are. Threads share it.

    Attributes:
        url: Where requests go; proxies of the environment are not used.
        seconds: Time limit for one attempt, from connecting to the last byte.
        retries: Further attempts after one that got no answer.
        backoff: Seconds before the first of them; each further one waits twice as long.
        headers: Sent with each request.
        secret: A text of the headers that nothing shows, although an answer may repeat it; "" for none.
        lost: Requests in a row that got no answer, over all calls of a step.
        lost_at: When the last of them was given up, by `time.monotonic`.
        away: Set while nothing is sent, which ends the pauses of the others.
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
        """Raises ValueError when a header's value is no printable ASCII; the message does not show it."""
        for name, value in self.headers.items():
            if not (value.isascii() and value.isprintable()):
                raise ValueError(f"{self.url}: the value of the header {name} is not printable ASCII")

    def ask(self, request: Any, read: Callable[[Any], T]) -> T:
        """What `read` makes of the JSON that the service answers a request with.

        Raises:
            Away: There is no answer to any attempt, or too many requests before had none.
            Refused: The service refuses what this request holds.
            ValueError: The service refuses every request, or `read` the answer.
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
        """Counts a request without an answer."""
        self.lost, self.lost_at = self.lost + 1, time.monotonic()
        if self.lost >= GIVEN_UP_AFTER:
            self.away.set()

    def _given_up(self) -> bool:
        """Whether nothing is sent now, because too many requests were lost within the time that one may take."""
        if self.away.is_set() and time.monotonic() > self.lost_at + self.seconds * (self.retries + 1):
            self.lost = 0
            self.away.clear()
        return self.away.is_set()

    def _attempt(self, content: bytes) -> Any:
        try:
            status, answer = post(self.url, content, self.headers, self.seconds)
        except (OSError, HTTPException) as error:  # whose text may be what the service sent
            said = f"{type(error).__name__}: {error}".encode(errors="replace")
            raise Away(self._without_secret(said).decode()) from None
        except ValueError:  # of http.client, whose text may quote a header, and so a key
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
        """The text with `HIDDEN` for the secret, however JSON escapes it; to be called before anything is cut."""
        if len(self.secret) < SHORTEST_SECRET:
            return text
        signs = (rf"(?:\\?{re.escape(sign)}|\\u{ord(sign):04x})" for sign in self.secret)
        return re.sub("".join(signs).encode(), HIDDEN, text, flags=re.IGNORECASE)


def post(url: str, content: bytes, headers: dict[str, str], seconds: float) -> tuple[int, bytes]:
    """The status of a POST request of JSON, and at most `MOST_BYTES` of the answer.

    Raises:
        TimeoutError: It took longer than `seconds`, although bytes may have arrived all the time.
        OSError, HTTPException: There is no complete answer.
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
    """Ends a connection that takes too long, which wakes the thread that reads from it."""
    late.set()
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
