"""Endpoint for agents: OpenAI's chat completions over HTTP, answered with the turns of samples.

The address has the name of the agent's run, which is its API key, too: http://127.0.0.1:PORT/KEY/v1. Requests wait
until the engine has sampled their turn, as long as that takes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from grpo_mega.environment.calls import calls_of_sglang, read_calls

ROLES = ("system", "user", "assistant", "tool")
READ = ("model", "messages", "tools", "tool_choice", "stream", "stream_options", "n", "logprobs")
WITHOUT_EFFECT = ("user", "metadata", "store", "parallel_tool_calls", "stop", "response_format")
"""Fields of a request that change nothing here, and are not said to be ignored; `_check` refuses some values."""
SECONDS_BETWEEN_LOOKS = 1.0
"""Seconds between two looks at whether an agent still waits for its answer."""
NOT_FOUND, REFUSED, LENGTH_REQUIRED = 404, 400, 411
"""Statuses after which clients do not try again."""


class RequestRefused(Exception):
    """Error: a request that gets no answer. The agent reads the message."""

    def __init__(self, message: str, status: int = REFUSED, code: str = "invalid_request_error") -> None:
        """`status` is HTTP's, `code` OpenAI's."""
        super().__init__(message)
        self.status, self.code = status, code


@dataclass
class Request:
    """A request for a turn.

    Attributes:
        messages: Its messages, see `plain`.
        tools: Its tools.
        calls: Whether the turn may call them.
        logprobs: Whether it wants log-probs.
        model: The model that it names.
        ignored: Its fields that change nothing.
        is_gone: Whether its client has hung up.
        answer: Will be the response.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    calls: bool
    logprobs: bool
    model: str
    ignored: list[str]
    is_gone: Callable[[], bool]
    answer: Future[dict[str, Any]] = field(default_factory=Future)

    @property
    def digest(self) -> str:
        """Identifies messages and tools."""
        return hashlib.sha256(json.dumps([self.messages, self.tools], sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class CallFormat:
    """How calls are read in a turn: `environment.open`, `close` and `tool_call_parser`."""

    open: str
    close: str
    parser: str | None

    def message(self, turn: str, request: Request, before: int) -> dict[str, Any]:
        """A turn, with so many `before` it, as OpenAI's message; one whose calls cannot be read, or that may make none,
        is text alone."""
        thoughts, end, said = turn.rpartition("</think>")
        calls: list[dict[str, Any]] = []
        if request.tools and request.calls and self.parser is not None:
            calls = json.loads(calls_of_sglang(turn, self.close, self.parser, request.tools) or "[]")
            said = "" if calls else said
        # In thoughts that do not end it has made none.
        elif request.tools and request.calls and (end or "<think>" not in said):
            said, calls = read_calls(said, self.open)
        message: dict[str, Any] = {"role": "assistant", "content": thoughts + end + said}
        if not calls or not all(call["name"] for call in calls):
            return message | {"content": turn}
        # Nine letters and digits, as Mistral's templates want, no two of a run alike, by which replies are matched.
        named = [
            {
                "id": f"call{before:03d}{number:02d}",
                "type": "function",
                "function": call | {"arguments": json.dumps(call["arguments"])},
            }
            for number, call in enumerate(calls)
        ]
        return message | {"tool_calls": named}


class Line:
    """The requests of one agent, from its threads to the event loop that answers them.

    Attributes:
        key: Name of the agent's run.
        events: The requests, and whatever else is `put`, in order.
        refused: Whether a request was refused because no more are answered.
        last_refusal: Why a request was refused for what it asks; "" if none was.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Requests go to this loop, which may rest between two of them."""
        self.key, self.events, self.refused = secrets.token_hex(16), asyncio.Queue[Any](), False
        self.last_refusal = ""
        self._loop, self._lock, self._why = loop, threading.Lock(), ""
        self._unread: list[Request] = []  # those whose answers no client has got

    def put(self, event: Any) -> None:
        """Puts an event into the queue, from any thread."""
        self._loop.call_soon_threadsafe(self.events.put_nowait, event)

    def ask(self, body: Any, is_gone: Callable[[], bool]) -> dict[str, Any] | None:
        """The response to a request, for which this thread waits; None if the client `is_gone`.

        A client that lost patience and asks the same again gets what the first request gets.

        Raises:
            RequestRefused: The request is refused.
        """
        try:
            request = _read(body, is_gone)
        except RequestRefused as refusal:
            self.last_refusal = str(refusal)
            raise
        with self._lock:
            same = [one for one in self._unread if (one.messages, one.tools) == (request.messages, request.tools)]
            # At once, and not at the next look: clients ask again within half a second.
            if again := next((one for one in same if one.is_gone()), None):
                request, again.is_gone = again, is_gone
            elif self._why:
                self.refused = True
                raise RequestRefused(self._why, code="context_length_exceeded")
            else:
                self._unread.append(request)
                self.put(request)
        while True:
            try:
                answer = request.answer.result(SECONDS_BETWEEN_LOOKS)
            except TimeoutError:
                answer = None
            if is_gone():
                return None
            if answer:
                with self._lock:
                    self._unread = [one for one in self._unread if one is not request]
                return answer

    def given_up(self, request: Request) -> bool:
        """Whether the client of a request without an answer is gone; then it is as if it had not been made."""
        with self._lock:
            if gone := request.is_gone():
                self._unread = [one for one in self._unread if one is not request]
            return gone

    def refuse(self, why: str) -> None:
        """Refuses the requests that wait, and all later ones."""
        with self._lock:
            self._why = self._why or why
            for request in self._unread:
                if not request.answer.done():
                    self.refused = True
                    request.answer.set_exception(RequestRefused(self._why, code="context_length_exceeded"))


class Endpoint(ThreadingHTTPServer):
    """The endpoint of a process."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self) -> None:
        """Listens at a free port."""
        super().__init__(("127.0.0.1", 0), _RequestHandler)
        self.lines: dict[str, Line] = {}
        # What clients would reach through a proxy is not here.
        for name in ("no_proxy", "NO_PROXY"):
            os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def add(self, line: Line) -> str:
        """Answers an agent from now on, at the address that is returned."""
        self.lines[line.key] = line
        return f"http://127.0.0.1:{self.server_port}/{line.key}"

    def remove(self, line: Line) -> None:
        """Refuses an agent's requests from now on."""
        self.lines.pop(line.key, None)
        line.refuse("the episode has ended")


@cache
def endpoint() -> Endpoint:
    """The endpoint of this process."""
    return Endpoint()


class _RequestHandler(BaseHTTPRequestHandler):
    """Answers one client."""

    protocol_version = "HTTP/1.1"
    # Head and body are two writes, the second of which would wait for the first to be acknowledged.
    disable_nagle_algorithm = True
    server: Endpoint

    def log_message(self, *_: Any) -> None:
        """Writes no line for each request."""

    def do_GET(self) -> None:
        """Names the one model there is."""
        if self.path.rstrip("/").endswith("/models"):
            self._send({"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "grpo_mega"}]})
        else:
            self._send_error(RequestRefused(f"nothing at {self.path}", NOT_FOUND))

    def do_POST(self) -> None:
        """Answers with a turn."""
        try:
            length = self.headers.get("Content-Length") or "0"
            if not length.isdecimal() or "Transfer-Encoding" in self.headers:
                self.close_connection = True
                raise RequestRefused("send the length of the request as Content-Length, and no chunks", LENGTH_REQUIRED)
            # Read in any case: the next request of the connection comes after it.
            text = self.rfile.read(int(length))
            if not self.path.partition("?")[0].rstrip("/").endswith("/chat/completions"):
                raise RequestRefused(f"nothing at {self.path}; this endpoint has /v1/chat/completions", NOT_FOUND)
            body = _json(text)
            key, bearer = self.path.split("/")[1], self.headers.get("Authorization", "").removeprefix("Bearer ")
            line = self.server.lines.get(key) or self.server.lines.get(bearer)
            if line is None:
                raise RequestRefused("no agent's run has this address or key: it has ended", NOT_FOUND)
            answer = line.ask(body, self._is_gone)
        except RequestRefused as refusal:
            self._send_error(refusal)
            return
        if answer is None:
            self.close_connection = True
        elif body.get("stream"):
            self._stream(answer, bool((body.get("stream_options") or {}).get("include_usage")))
        else:
            self._send(answer)

    def _is_gone(self) -> bool:
        """Whether the client has closed the connection."""
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        # This end is closed, too.
        except OSError:
            return True

    def _send_error(self, refusal: RequestRefused) -> None:
        error = {"message": str(refusal), "type": "invalid_request_error", "code": refusal.code, "param": None}
        self._send({"error": error}, refusal.status)

    def _send(self, content: Mapping[str, Any], status: int = 200) -> None:
        self._write(status, "application/json", json.dumps(content).encode())

    def _stream(self, answer: dict[str, Any], with_usage: bool) -> None:
        """Sends the turn as the events of a stream, whole in the first."""
        (choice,) = answer["choices"]
        calls = [call | {"index": number} for number, call in enumerate(choice["message"].get("tool_calls", ()))]
        delta = choice["message"] | ({"tool_calls": calls} if calls else {})
        common = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        of_turn = {"index": 0, "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}
        events = [common | {"choices": [of_turn]}]
        events += [common | {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]}]
        events += [common | {"choices": [], "usage": answer["usage"]}] if with_usage else []
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self._write(200, "text/event-stream", "".join([*lines, "data: [DONE]\n\n"]).encode())

    def _write(self, status: int, kind: str, content: bytes) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        # The client is gone.
        except OSError:
            self.close_connection = True


def plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with what chat templates read, always written alike, so that messages can be compared.

    Raises:
        RequestRefused: It is not a message of text.
    """
    role = {"developer": "system"}.get(str(message.get("role")), message.get("role"))
    if role not in ROLES:
        raise RequestRefused(f"messages: the role is {role!r}, not one of {', '.join(ROLES)}")
    content = message.get("content") or ""
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise RequestRefused("messages: a part of the content is not text")
        content = "\n".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise RequestRefused("messages: the content is not text")
    written: dict[str, Any] = {"role": role, "content": content}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise RequestRefused("messages: tool_calls is not a list")
        written["tool_calls"] = [_plain_call(call) for call in calls]
    return written | {name: message[name] for name in ("tool_call_id", "name") if isinstance(message.get(name), str)}


def _plain_call(call: Any) -> dict[str, Any]:
    try:
        function = call["function"]
        arguments = function["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        named = {"name": function["name"], "arguments": arguments}
        return {"id": str(call.get("id", "")), "type": "function", "function": named}
    except (KeyError, TypeError, AttributeError, ValueError):
        raise RequestRefused("messages: a tool call has no function with a name and JSON arguments") from None


def _json(text: bytes) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise RequestRefused("the request is not a JSON object")
    return body


def _read(body: dict[str, Any], is_gone: Callable[[], bool]) -> Request:
    """The request in a body.

    Raises:
        RequestRefused: It asks for what the policy's turns cannot give; names the field.
    """
    messages, tools = body.get("messages"), body.get("tools") or []
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise RequestRefused("messages: not a list of messages")
    written = [plain(one) for one in messages]
    if written[-1]["role"] == "assistant":
        raise RequestRefused("messages: the last one is the assistant's, which is not continued; end with another")
    if not isinstance(tools, list) or not all(isinstance(one, dict) and "function" in one for one in tools):
        raise RequestRefused("tools: not a list of functions")
    choice, form = body.get("tool_choice") or "auto", body.get("response_format") or {"type": "text"}
    if choice not in ("auto", "none"):
        raise RequestRefused("tool_choice: the policy decides what it calls; leave it out, or write none")
    if body.get("n") not in (None, 1):
        raise RequestRefused("n: a request gets one turn")
    if body.get("stop"):
        raise RequestRefused("stop: turns end with environment.close, or another stop token of the run")
    if form != {"type": "text"}:
        raise RequestRefused("response_format: only text is, others are not enforced; leave it out, and check the text")
    if not isinstance(body.get("stream_options") or {}, dict):
        raise RequestRefused("stream_options: not an object")
    unread = sorted(set(body) - {*READ, *WITHOUT_EFFECT})
    ignored = [f"{name}={json.dumps(body[name])[:40]}" for name in unread if body[name] not in (None, [], {})]
    model, logprobs = str(body.get("model", "policy")), bool(body.get("logprobs"))
    return Request(written, tools, choice == "auto", logprobs, model, ignored, is_gone)


def response(request: Request, message: Mapping[str, Any], turn: Mapping[str, Any], name: str) -> dict[str, Any]:
    """OpenAI's response with a message.

    Args:
        request: The request.
        message: The message in it.
        turn: The turn of the policy: its "token_ids" and "logprobs", the number of "prompt_tokens" before it, and
            whether it was "cut" off by a limit.
        name: Id of the response.
    """
    ids, logprobs = turn["token_ids"], turn["logprobs"]
    # As vLLM writes tokens that may be no text of their own.
    tokens = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(ids, logprobs, strict=True)
    ]
    ended = "length" if turn["cut"] else "tool_calls" if message.get("tool_calls") else "stop"
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": ended,
        "logprobs": {"content": tokens} if request.logprobs else None,
        "token_ids": ids,
    }
    before, sampled = turn["prompt_tokens"], len(ids)
    usage = {"prompt_tokens": before, "completion_tokens": sampled, "total_tokens": before + sampled}
    named = {"id": name, "object": "chat.completion", "created": int(time.time()), "model": request.model}
    return named | {"choices": [choice], "usage": usage}
