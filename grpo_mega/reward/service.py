"""Scoring over HTTP: a client for JSON requests with a time limit and retries, and reward terms computed by a user's
service, which receives samples in batches and returns a verdict for each.

The client is built on http.client: a time limit from connecting to the last byte (httpx limits each read), answers of
at most `MOST_BYTES`, and errors whose text never shows the key.
"""

from __future__ import annotations

import base64
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from html.entities import html5
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from itertools import chain
from typing import Any, TypeVar
from urllib.parse import urlsplit

from grpo_mega.config.schema.terms import HttpOptions
from grpo_mega.errors import InputError
from grpo_mega.platform.trace import span
from grpo_mega.reward.verdict import NoVerdict, Verdict, read_verdict, sample_json, shown
from grpo_mega.types import Sample

MOST_BYTES = 64 << 20
"""Largest answer read, in bytes."""
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
"""Shortest key to hide, in characters. Local services get shorter ones, such as "none", which answers may
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
        secret: A text in the headers that is never shown, even if an answer repeats it; "" for none. See `spellings`.
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
        """Raises InputError when a header's value is not printable ASCII; the message never shows it."""
        for name, value in self.headers.items():
            if not (value.isascii() and value.isprintable()):
                raise InputError(self.url, f"the value of the header {name} is not printable ASCII", "correct it")
        self._secret = spellings(self.secret) if len(self.secret) >= SHORTEST_SECRET else None

    def ask(self, request: Any, read: Callable[[Any], T]) -> T:
        """Sends a request and returns `read` of the JSON answer.

        Raises:
            Away: No attempt was answered, or too many earlier requests were not.
            Refused: The service refuses the content of this request.
            InputError: The service refuses every request, or `read` refuses the answer.
        """
        content = json.dumps(request).encode()
        for attempt in range(self.retries + 1):
            # Requests are suspended for as long as one may take, then tried again.
            if self.away.is_set() and time.monotonic() > self.lost_at + self.seconds * (self.retries + 1):
                self.lost = 0
                self.away.clear()
            if self.away.is_set():
                raise Away(f"{self.url} was given up after {self.lost} requests without an answer")
            try:
                with span("request"):
                    answer = self._attempt(content)
            except Away as away:
                if attempt == self.retries:
                    self.lost, self.lost_at = self.lost + 1, time.monotonic()
                    if self.lost >= GIVEN_UP_AFTER:
                        self.away.set()
                    tries = f" ({attempt + 1} attempts)" if attempt else ""
                    raise Away(f"{self.url}: {away}{tries}") from None
                # Not `time.sleep`: when another thread gives the service up, this pause ends at once.
                self.away.wait(min(self.backoff * 2**attempt, LONGEST_PAUSE))
            else:
                self.lost = 0
                self.away.clear()
                return read(answer)
        raise AssertionError("unreachable")

    def _attempt(self, content: bytes) -> Any:
        try:
            status, answer = post(self.url, content, self.headers, self.seconds)
        # The text of such an error may be what the service sent, which may repeat the key.
        except (OSError, HTTPException) as error:
            cause = f"{type(error).__name__}: {error}".encode(errors="replace")
            raise Away(self._without_secret(cause).decode()) from None
        # http.client's error may quote a header and so the key; `from None` keeps it out of tracebacks too.
        except ValueError:
            raise InputError(self.url, "the url or a header is not valid HTTP", "correct the term's options") from None
        # The secret is hidden before anything is cut, since a cut secret would no longer match its pattern.
        answer = self._without_secret(answer)
        words = f"answered {status}: {answer[: 4 * SHOWN_CHARACTERS].decode(errors='replace')[:SHOWN_CHARACTERS]!r}"
        if status < 200 or status >= 500 or status in TRY_LATER:
            raise Away(words)
        if status in TOO_MUCH:
            raise Refused(f"{self.url} {words}")
        if status != 200:
            raise InputError(self.url, words, "correct the term's options, or the service")
        try:
            return json.loads(answer)
        except (ValueError, RecursionError):
            raise Away(f"{words}, which is not JSON") from None

    def _without_secret(self, text: bytes) -> bytes:
        """The text with the secret replaced by `HIDDEN`, however it is spelled; call it before cutting the text."""
        return self._secret.sub(HIDDEN, text) if self._secret else text


def spellings(secret: str) -> re.Pattern[bytes]:
    """Pattern of a secret in plain text, with signs escaped as in JSON, URLs or HTML, or within a text in base64.

    In base64 the first and the last sign may hold a few bits of the secret's neighbours, and are not part of it.
    """
    ways = ["".join(map(_escaped, secret))]
    for before in range(3):
        # Base64 codes three bytes as four signs of six bits each, so a secret has three spellings, by the number of
        # bytes in front of it, modulo 3. The signs before the first bit of the secret, and a last one shared with the
        # next byte, are cut off.
        coded = base64.b64encode(bytes(before) + secret.encode()).decode()
        whole = coded[-(-8 * before // 6) : 8 * (before + len(secret)) // 6]
        ways.append(r"(?:\s|\\[nr])*".join(s if s.isalnum() else _escaped(s) for s in whole) + "[a-z0-9+/_-]?=*")
    return re.compile("|".join(ways).encode(), re.IGNORECASE)


@cache
def _escaped(sign: str) -> str:
    """Pattern of a sign in the escapes of JSON, URLs and HTML; + and / also as base64 for URLs writes them."""
    code, same = ord(sign), {"+": "+-", "/": "/_", " ": " +"}.get(sign, sign)
    names = "|".join(sorted({name.rstrip(";") for name, one in html5.items() if one == sign}))
    entity = rf"(?:&|\\u0026)(?:amp;)?(?:#0*{code}|#x0*{code:x}{'|' + names if names else ''})(?![a-z0-9]);?"
    return rf"(?:\\?[{re.escape(same)}]|\\u{code:04x}|%(?:25)?{code:02x}|{entity})"


class _Response(HTTPResponse):
    """A response that refuses chunks of negative size, for which Python would read without end."""

    def _read_next_chunk_size(self) -> int:
        size: int = super()._read_next_chunk_size()  # type: ignore[misc]
        if size < 0:
            raise HTTPException(f"a chunk of {size} bytes")
        return size


def post(url: str, content: bytes, headers: dict[str, str], seconds: float) -> tuple[int, bytes]:
    """Sends JSON by POST; returns the status and at most `MOST_BYTES` of the answer.

    Raises:
        TimeoutError: The request took longer than `seconds`, even if bytes kept arriving.
        OSError, HTTPException: The answer is missing, incomplete or not HTTP.
        ValueError: The url or a header cannot be sent.
    """
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=seconds)
    connection.response_class = _Response
    late = threading.Event()
    watch, until = None, time.monotonic() + seconds
    try:
        # Connected explicitly, as the timer below needs the socket.
        connection.connect()
        # The socket's timeout restarts with every byte; this timer limits the whole request, connecting included.
        watch = threading.Timer(max(0.0, until - time.monotonic()), _end, [connection.sock, late])
        watch.daemon = True
        watch.start()
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("POST", path, content, {"Content-Type": "application/json", **headers})
        status, answer = _received(connection)
        # An answer that the timer has cut off may look complete.
        if late.is_set():
            raise TimeoutError
        return status, answer
    except (OSError, HTTPException) as error:
        if late.is_set() or isinstance(error, TimeoutError):
            raise TimeoutError(f"no answer within reward.timeout_seconds={seconds:g}") from None
        raise
    finally:
        if watch:
            watch.cancel()
        connection.close()


def _received(connection: HTTPConnection) -> tuple[int, bytes]:
    """Status and beginning of the answer; whatever a malformed one raises becomes an OSError or HTTPException."""
    try:
        response = connection.getresponse()
        return response.status, response.read(MOST_BYTES)
    except (OSError, HTTPException):
        raise
    # http.client lets through whatever Python raises for the numbers in a malformed answer.
    except Exception as error:
        raise HTTPException(f"the answer is not HTTP: {type(error).__name__}: {error}") from None


def _end(connection: socket.socket, late: threading.Event) -> None:
    """Shuts down a connection that takes too long, which wakes the thread reading from it."""
    late.set()
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


@dataclass
class Http:
    """A user's HTTP service that scores samples.

    Attributes:
        options: Address and request settings.
        seconds: Time limit for one attempt.
        service: Client shared by all calls, so that a hanging service is remembered between calls.
    """

    options: HttpOptions
    seconds: float
    service: Service = field(init=False)

    def __post_init__(self) -> None:
        self.service = Service(self.options.url, self.seconds, self.options.retries, self.options.backoff)

    def outcomes(self, samples: Sequence[Sample]) -> list[Verdict | Exception]:
        """Verdicts of the service: sends {"samples": [...]}, expects {"verdicts": [...]}, one per sample.

        A service that does not answer leaves the samples of the batch without a score. A refusal, or any other answer,
        is an error.
        """
        options = self.options
        batches = [samples[start : start + options.batch] for start in range(0, len(samples), options.batch)]
        with ThreadPoolExecutor(options.at_once, "reward worker") as threads:
            return [*chain.from_iterable(threads.map(partial(_of_batch, self.service), batches))]


def _of_batch(service: Service, samples: Sequence[Sample]) -> list[Verdict | Exception]:
    request = {"samples": [sample_json(sample) for sample in samples]}
    try:
        return service.ask(request, partial(_read, service.url, len(samples)))
    except Away as away:
        return [Verdict(0.0, unscorable=str(away)) for _ in samples]
    # The error belongs to the samples of this batch: raised, it would end the scoring of all others.
    except Exception as error:
        return [error for _ in samples]


def _read(url: str, number: int, answer: Any) -> list[Verdict | Exception]:
    verdicts = answer.get("verdicts") if isinstance(answer, dict) else None
    if not isinstance(verdicts, list) or len(verdicts) != number:
        what = f"answered {shown(answer)[:300]} to {number} samples"
        raise InputError(url, what, 'let it answer {"verdicts": [...]} with one for each')
    read: list[Verdict | Exception] = []
    for verdict in verdicts:
        try:
            read.append(read_verdict(verdict))
        except NoVerdict as error:
            read.append(ValueError(f"{url} {error}"))
    return read
