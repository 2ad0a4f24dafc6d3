"""A real HTTP server that answers as SGLang does when it is asked how likely the tokens of a text are.

Its model is a formula of a token and the one before it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

from grpo_mega.data.tokenizer import Tokenizer


def logprob(before: int, token: int) -> float:
    """What the model of the server says of a token after another one."""
    return -((7 * before + 3 * token) % 11 + 1) / 4


class TeachingServer(ThreadingHTTPServer):
    """Has the tokens of a tokenizer; what it was asked, and which answers it gives wrong, can be seen and set."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.decode: Callable[[Sequence[int]], str] = tokenizer.decode
        self.vocab_size, self.model = tokenizer.vocab_size, "models/Teacher"
        self.asked: list[list[int]] = []
        self.failures: list[int] = []
        """Statuses of the next answers, in order."""
        self.answer: dict[str, Any] | None = None
        """What it answers instead."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: TeachingServer

    def log_message(self, *_: object) -> None:
        """Prints nothing."""

    def do_GET(self) -> None:
        self.send({"model_path": self.server.model, "weight_version": "default"})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids, spelled = request["input_ids"], request["return_text_in_logprobs"]
        self.server.asked.append(ids)
        assert request["return_logprob"]
        assert request["logprob_start_len"] == 0
        if self.server.failures:
            self.send({"error": "busy"}, self.server.failures.pop(0))
            return
        scores = [None, *(logprob(before, token) for before, token in pairwise(ids))]
        shown = [token if token < self.server.vocab_size - 1 else 0 for token in ids]  # as SGLang does
        texts = [self.server.decode([token]) if spelled else None for token in shown]
        found = [[*one] for one in zip(scores, shown, texts, strict=True)]
        self.send(self.server.answer or {"text": "", "meta_info": {"input_token_logprobs": found}})

    def send(self, content: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def teaching(tokenizer: Tokenizer) -> Iterator[TeachingServer]:
    """A server that answers until the context ends."""
    with TeachingServer(tokenizer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
