"""The endpoint over real HTTP: what agents send, what they get, and what they are refused."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from agents import OPENER, user
from limits import limit

from grpo_mega.environment import agent as agent_of
from grpo_mega.environment import endpoint as endpoint_of
from grpo_mega.environment.agent import OUT_OF_TOKENS, Played
from grpo_mega.environment.endpoint import CallFormat, endpoint

HERMES = CallFormat("<tool_call>", "</tool_call>", None)
DEEPSEEK = CallFormat("<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>", None)
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "a", "n": 2}}\n'


def turn(text: str, cut: bool = False, ids: Sequence[int] = (7, 8, 9), before: int = 5) -> dict[str, Any]:
    logprobs = [-0.5 * one for one in ids]
    return {"text": text, "token_ids": [*ids], "logprobs": logprobs, "prompt_tokens": before, "cut": cut}


def send(
    base_url: str, body: Any, path: str = "/chat/completions", key: str = "", method: str | None = None
) -> tuple[int, bytes]:
    """Status and content of what is answered."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{base_url}{path}", data, headers, method=method)
    try:
        with OPENER.open(request, timeout=limit(60)) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def ask(base_url: str, messages: Any, **more: Any) -> dict[str, Any]:
    status, content = send(base_url, {"model": "mine", "messages": messages, **more})
    assert status == 200, content
    return json.loads(content)


def error_of(answered: tuple[int, bytes]) -> tuple[int, str, str]:
    """Status, code and message."""
    status, content = answered
    error = json.loads(content)["error"]
    return status, error["code"], error["message"]


def play(
    agent: Callable[..., Any], *turns: dict[str, Any], form: CallFormat = HERMES, at_once: int = 1
) -> tuple[list[dict[str, Any]], float | None]:
    """The requests that get these turns, and the reward; afterwards no more are answered. The first is answered when
    so many wait."""

    async def played() -> tuple[list[dict[str, Any]], float | None]:
        run, requests = Played(agent, {}, form), []
        try:
            for one in turns:
                request = await run.requested()
                assert request, "the agent has ended"
                if not requests:
                    await asyncio.to_thread(wait_until, lambda: len(run._line._unread) == at_once)
                requests.append(request)
                run.answer(one)
            return requests, await run.finish()
        finally:
            await run.close()

    return asyncio.run(asyncio.wait_for(played(), limit(60)))


def test_a_response_has_the_fields_of_openai() -> None:
    got: list[dict[str, Any]] = []

    def agent(base_url: str) -> float:
        got.append(ask(base_url, [user("a")], logprobs=True))
        got.append(ask(base_url, [user("b")]))
        return 0.5

    _, reward = play(agent, turn("Seven."), turn("Eight.", ids=[4], before=11))
    assert reward == 0.5
    first, second = got
    assert first.keys() == {"id", "object", "created", "model", "choices", "usage"}
    assert (first["object"], first["model"]) == ("chat.completion", "mine")
    assert first["id"] != second["id"]
    (choice,) = first["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Seven."}
    assert (choice["index"], choice["finish_reason"], choice["token_ids"]) == (0, "stop", [7, 8, 9])
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == [-3.5, -4.0, -4.5]
    assert first["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    assert second["usage"] == {"prompt_tokens": 11, "completion_tokens": 1, "total_tokens": 12}
    assert second["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("said", "cut", "reason"),
    [("Seven.", False, "stop"), ("Sev", True, "length"), (CALL, False, "tool_calls"), (CALL, True, "length")],
)
def test_a_turn_says_why_it_ended(said: str, cut: bool, reason: str) -> None:
    got: list[str] = []

    def agent(base_url: str) -> None:
        got.append(ask(base_url, [user("a")], tools=[TOOL])["choices"][0]["finish_reason"])

    play(agent, turn(said, cut))
    assert got == [reason]


@pytest.mark.parametrize("with_usage", [False, True])
@pytest.mark.parametrize("said", ["Seven.", CALL])
def test_a_stream_has_the_turn_and_ends(said: str, with_usage: bool) -> None:
    got: list[bytes] = []

    def agent(base_url: str) -> None:
        options = {"stream_options": {"include_usage": True}} if with_usage else {}
        body = {"messages": [user("a")], "tools": [TOOL], "stream": True, **options}
        got.append(send(base_url, body)[1])

    play(agent, turn(said))
    *events, done, rest = got[0].decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    read = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {one["object"] for one in read} == {"chat.completion.chunk"}
    if with_usage:
        last = read.pop()
        assert (last["choices"], last["usage"]["total_tokens"]) == ([], 8)
    choices = [one["choices"][0] for one in read]
    assert [one["finish_reason"] for one in choices] == [None, "tool_calls" if said == CALL else "stop"]
    delta = choices[0]["delta"]
    if said == CALL:
        assert [(one["index"], one["function"]["name"]) for one in delta["tool_calls"]] == [(0, "look_up")]
    else:
        assert delta == {"role": "assistant", "content": said}


LOOKED = ("look_up", {"word": "a", "n": 2})
OTHER = '<tool_call>{"name": "other", "arguments": {}}'
SEP = "<｜tool▁sep｜>"
OF_DEEPSEEK = f"function{SEP}look_up\n```json\n{{}}\n```<｜tool▁call▁end｜>"


@pytest.mark.parametrize(
    ("said", "more", "text", "calls"),
    [
        pytest.param(f"I look.\n{CALL}", {}, "I look.\n", [LOOKED], id="one"),
        pytest.param(f"{CALL}</tool_call>\n{OTHER}", {}, "", [LOOKED, ("other", {})], id="two"),
        pytest.param(f"{CALL}</tool_call>\n<tool_call>oh", {}, None, [], id="one of two"),
        pytest.param('<tool_call>{"name": "look_up", "argu', {}, None, [], id="no JSON"),
        pytest.param('<tool_call>{"arguments": {}}', {}, None, [], id="no name"),
        pytest.param('<tool_call>["look_up"]', {}, None, [], id="no object"),
        pytest.param('<tool_call>{"name": "look_up"}', {}, "", [("look_up", {})], id="no arguments"),
        pytest.param(f"<think>{CALL}</think>No.", {}, None, [], id="in thoughts"),
        pytest.param(f"<think>{CALL}", {}, None, [], id="in thoughts without an end"),
        pytest.param(f"<think>{OTHER}</think>So: {CALL}", {}, f"<think>{OTHER}</think>So: ", [LOOKED], id="after"),
        pytest.param(CALL, {"tool_choice": "none"}, None, [], id="not allowed"),
        pytest.param(CALL, {"tools": None}, None, [], id="no tools"),
        pytest.param("Seven.", {}, None, [], id="none"),
    ],
)
def test_calls_of_hermes_are_read(
    said: str, more: dict[str, Any], text: str | None, calls: list[tuple[str, Any]]
) -> None:
    assert read(HERMES, said, more) == (said if text is None else text, calls)


@pytest.mark.parametrize(
    ("said", "text", "calls"),
    [
        (f"Hm.<｜tool▁calls▁begin｜>{DEEPSEEK.open}{OF_DEEPSEEK}", "Hm.", [("look_up", {})]),
        (f"{DEEPSEEK.open}{OF_DEEPSEEK}\n{DEEPSEEK.open}other{SEP}[1]", "", [("look_up", {}), ("other", [1])]),
        (f"{DEEPSEEK.open}{SEP}", None, []),
    ],
    ids=["V3", "two, of V3.1", "no name"],
)
def test_calls_of_deepseek_are_read(said: str, text: str | None, calls: list[tuple[str, Any]]) -> None:
    assert read(DEEPSEEK, said, {}) == (said if text is None else text, calls)


def read(form: CallFormat, said: str, more: dict[str, Any]) -> tuple[str, list[tuple[str, Any]]]:
    """The text and the calls of a turn, as an agent gets them."""
    got: list[dict[str, Any]] = []

    def agent(base_url: str) -> None:
        got.append(ask(base_url, [user("a")], **{"tools": [TOOL]} | more)["choices"][0]["message"])

    play(agent, turn(said), form=form)
    calls = [one["function"] for one in got[0].get("tool_calls", [])]
    return got[0]["content"], [(one["name"], json.loads(one["arguments"])) for one in calls]


def test_no_two_calls_of_a_run_have_the_same_id() -> None:
    ids: list[str] = []

    def agent(base_url: str) -> None:
        for _ in range(2):
            message = ask(base_url, [user("a")], tools=[TOOL])["choices"][0]["message"]
            ids.extend(call["id"] for call in message["tool_calls"])

    play(agent, *[turn(f"{CALL}</tool_call>{CALL}")] * 2)
    assert len({*ids}) == 4
    assert all(len(one) == 9 and one.isalnum() for one in ids), "as Mistral's templates want them"


def with_function(message: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    calls = [call | {"function": change(call["function"])} for call in message.get("tool_calls", [])]
    return message | ({"tool_calls": calls} if calls else {})


@pytest.mark.parametrize("said", ["Seven.", CALL, f"I look. {CALL}", "<think>\nHm.\n</think>\n\nSeven.\n"])
@pytest.mark.parametrize(
    "again",
    [
        lambda message: message,
        lambda message: message | {"content": [{"type": "text", "text": message["content"]}]},
        lambda message: message | {"content": message["content"] or None},
        lambda message: message | {"refusal": None, "audio": None, "function_call": None, "annotations": []},
        lambda message: {"tool_calls": None, "name": None} | message,
        lambda message: with_function(message, lambda of: of | {"arguments": json.loads(of["arguments"])}),
        lambda message: with_function(message, lambda of: of | {"arguments": of["arguments"].replace(" ", "")}),
    ],
    ids=["unchanged", "parts", "none", "further fields", "nulls", "object", "other spaces"],
)
def test_a_turn_that_comes_back_goes_on(said: str, again: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """However a client writes the message that it got."""

    def agent(base_url: str) -> None:
        chat: list[dict[str, Any]] = [user("a")]
        for _ in range(2):
            message = ask(base_url, chat, tools=[TOOL])["choices"][0]["message"]
            chat += [again(message), {"role": "tool", "content": "7", "tool_call_id": "call00000"}]
        chat.append(user("?"))
        ask(base_url, chat, tools=[TOOL])

    requests, _ = play(agent, *[turn(said)] * 3)
    assert [request["new"] for request in requests] == [None, 1, 2]


@pytest.mark.parametrize(
    "change",
    [
        lambda chat: [user("b"), *chat[1:]],
        lambda chat: [chat[0], chat[1] | {"content": "Eight."}, *chat[2:]],
        lambda chat: chat[2:],
        lambda chat: [{"role": "system", "content": "a"}, *chat],
        lambda chat: chat[:1],
    ],
    ids=["question", "answer", "forgotten", "system", "again"],
)
def test_a_changed_history_begins_anew(change: Callable[[list[Any]], list[Any]]) -> None:
    def agent(base_url: str) -> None:
        chat: list[Any] = [user("a")]
        chat += [ask(base_url, chat)["choices"][0]["message"], user("?")]
        ask(base_url, change(chat))

    requests, _ = play(agent, turn("Seven."), turn("Yes."))
    assert [request["new"] for request in requests] == [None, None]


def test_other_tools_begin_anew() -> None:
    def agent(base_url: str) -> None:
        chat = [user("a")]
        chat += [ask(base_url, chat, tools=[TOOL])["choices"][0]["message"], user("?")]
        ask(base_url, chat)

    requests, _ = play(agent, turn("Seven."), turn("Yes."))
    assert [(request["new"], len(request["tools"])) for request in requests] == [(None, 1), (None, 0)]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
FINE: dict[str, Any] = {"messages": [user("a")]}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (FINE | {"n": 2}, "n:"),
        (FINE | {"stop": ["x"]}, "stop:"),
        (FINE | {"response_format": {"type": "json_object"}}, "response_format:"),
        (FINE | {"response_format": "json"}, "response_format:"),
        (FINE | {"tool_choice": "required", "tools": [TOOL]}, "tool_choice:"),
        (FINE | {"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice:"),
        (FINE | {"tools": [1]}, "tools:"),
        (FINE | {"tools": {"function": 1}}, "tools:"),
        (FINE | {"stream": True, "stream_options": 1}, "stream_options:"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages:"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages:"),
        ({"messages": [*FINE["messages"], {"role": "assistant", "content": "b"}]}, "assistant"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": 7}, user("a")]}, "tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, user("a")]}, "tool call"),
        ({"messages": [{"role": "critic", "content": "a"}]}, "'critic'"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "role"),
        ({"messages": []}, "messages:"),
        ({"messages": "a"}, "messages:"),
        ({"messages": ["a"]}, "messages:"),
        ({}, "messages:"),
        (b"{", "JSON"),
        (b"[]", "JSON"),
        (b"\xff", "JSON"),
        (b"", "JSON"),
        (b"[" * 10**6, "JSON"),
    ],
)
def test_what_the_policy_cannot_do_is_refused_and_the_agent_goes_on(body: Any, field: str) -> None:
    refused: list[tuple[int, str, str]] = []

    def agent(base_url: str) -> float:
        refused.append(error_of(send(base_url, body)))
        return float(len(ask(base_url, [user("a")])["choices"]))

    requests, reward = play(agent, turn("Seven."))
    assert (len(requests), reward) == (1, 1.0)
    ((status, code, message),) = refused
    assert (status, code) == (400, "invalid_request_error")
    assert field in message


@pytest.mark.parametrize(
    ("path", "method"), [("/completions", "POST"), ("/chat", "POST"), ("/responses", "POST"), ("/files", "GET")]
)
def test_what_is_not_there_is_not_found(path: str, method: str) -> None:
    got: list[tuple[int, str, str]] = []

    def agent(base_url: str) -> None:
        got.append(error_of(send(base_url, FINE if method == "POST" else None, path, method=method)))

    play(agent)
    ((status, _, message),) = got
    assert status == 404
    assert path in message


def test_the_run_is_found_by_its_address_or_by_its_key() -> None:
    statuses: list[int] = []

    def agent(base_url: str, api_key: str) -> None:
        root, _, _ = base_url.rpartition(f"/{api_key}")
        body = FINE | {"seed": 1}
        for base in (base_url, f"{base_url}/", f"{root}/v1", f"{root}/openai/v1", f"{root}/openai/deployments/x"):
            statuses.append(send(base, body, key="" if base.startswith(base_url) else api_key)[0])
        for key in ("", "EMPTY", api_key[:-1]):
            statuses.append(send(f"{root}/v1", body, key=key)[0])

    requests, _ = play(agent, *[turn("Seven.")] * 5)
    assert statuses == [*[200] * 5, *[404] * 3]
    assert {*map(json.dumps, requests)} == {json.dumps(requests[0])}


def test_fields_without_effect_are_named() -> None:
    def agent(base_url: str) -> None:
        unsaid = {"user": "me", "n": 1, "stop": None, "tools": [], "response_format": {"type": "text"}, "seed": None}
        ask(base_url, [user("a")], temperature=0, max_tokens=5, top_p=1.0, foo={"a": "b" * 99}, **unsaid)

    ((request,), _) = play(agent, turn("Seven."))
    names = [one.partition("=")[0] for one in request["ignored"]]
    assert names == ["foo", "max_tokens", "temperature", "top_p"]
    assert "max_tokens=5" in request["ignored"]
    assert max(map(len, request["ignored"])) < 60


@pytest.mark.parametrize("head", ["Transfer-Encoding: chunked", "Content-Length: many", "Content-Length: -1"])
def test_a_request_without_its_length_is_refused_and_its_connection_closed(head: str) -> None:
    got: list[bytes] = []

    def agent(base_url: str) -> None:
        name, _, port = base_url.split("/")[2].partition(":")
        with socket.create_connection((name, int(port))) as connection:
            connection.sendall(f"POST /x/chat/completions HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode())
            got.append(connection.makefile("rb").read())

    play(agent)
    assert got[0].startswith(b"HTTP/1.1 411 ")
    assert b"Content-Length, and no chunks" in got[0]


def test_the_one_model_is_listed() -> None:
    got: list[tuple[int, bytes]] = []

    def agent(base_url: str) -> None:
        got.append(send(base_url, None, "/models"))

    play(agent)
    assert got[0][0] == 200
    assert [one["id"] for one in json.loads(got[0][1])["data"]] == ["policy"]


@pytest.mark.parametrize("names", ["ab", "aa"])
def test_of_two_requests_at_once_each_gets_a_turn_of_its_own(names: str) -> None:
    got: list[tuple[str, str]] = []

    def agent(base_url: str) -> None:
        def said(name: str) -> tuple[str, str]:
            return name, ask(base_url, [user(name)])["choices"][0]["message"]["content"]

        with ThreadPoolExecutor(2) as threads:
            got.extend(threads.map(said, names))

    requests, _ = play(agent, turn("first"), turn("second"), at_once=2)
    asked = [request["messages"][0]["content"] for request in requests]
    assert sorted(got) == sorted(zip(asked, ["first", "second"], strict=True))
    assert [request["new"] for request in requests] == [None, None]


def hang_up(base_url: str, body: bytes, until: Callable[[], bool]) -> None:
    """Sends a request, and closes the connection before it is answered, once something is so."""
    host, _, path = base_url.removeprefix("http://").partition("/")
    name, _, port = host.partition(":")
    with socket.create_connection((name, int(port))) as connection:
        head = f"POST /{path}/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_until(until)


def clients() -> int:
    """Number of threads that answer clients."""
    return sum("process_request" in thread.name for thread in threading.enumerate())


def wait_until(so: Callable[[], bool]) -> None:
    until = time.monotonic() + limit(60)
    while not so():
        assert time.monotonic() < until
        threading.Event().wait(0.005)


@pytest.mark.parametrize("noticed", [False, True])
@pytest.mark.parametrize("answered", [False, True])
def test_a_client_that_loses_patience_and_asks_again_gets_the_first_answer(
    monkeypatch: pytest.MonkeyPatch, noticed: bool, answered: bool
) -> None:
    """Whether or not the endpoint has noticed yet, and has its answer by then; and the next request another one."""
    monkeypatch.setattr(endpoint_of, "SECONDS_BETWEEN_LOOKS", 0.005 if noticed else limit(60))
    asked, ready, got = threading.Event(), threading.Event(), list[str]()

    def agent(base_url: str) -> None:
        before = clients()
        hang_up(base_url, json.dumps(FINE).encode(), asked.is_set)
        if noticed:
            wait_until(lambda: clients() <= before)
        ready.set()
        got.extend(ask(base_url, FINE["messages"])["choices"][0]["message"]["content"] for _ in range(2))

    async def played() -> tuple[list[str], float | None]:
        run = Played(agent, {}, HERMES)
        await run.requested()
        (request,) = run._line._unread
        first = request.is_gone
        asked.set()
        await asyncio.to_thread(wait_until, ready.is_set)
        if not answered:
            await asyncio.to_thread(wait_until, lambda: request.is_gone is not first)
        for said in ("first", "second"):
            run.answer(turn(said))
            await run.requested()
        try:
            return run.turns, await run.finish()
        finally:
            await run.close()

    assert asyncio.run(asyncio.wait_for(played(), limit(60))) == (["first", "second"], None)
    assert got == ["first", "second"]


@pytest.mark.parametrize(
    ("asks", "gets", "drifted"), [("321", "abc", False), ("123", "cba", False), ("124", "abc", True)]
)
def test_a_turn_answers_the_request_that_it_did_even_if_another_comes_first(
    monkeypatch: pytest.MonkeyPatch, asks: str, gets: str, drifted: bool
) -> None:
    """Of three that are made at once; where one does not come again, what comes is answered, which is told."""
    monkeypatch.setattr(agent_of, "SECONDS_TO_AGREE", 0.01)
    got: dict[str, str] = {}

    async def played(order: str, *expected: str) -> list[dict[str, Any]]:
        def agent(base_url: str) -> None:
            def one(name: str) -> None:
                got[name] = ask(base_url, [user(name)])["choices"][0]["message"]["content"]

            threads = [threading.Thread(target=one, args=(name,), daemon=True) for name in order]
            started.wait(limit(60))
            for number, thread in enumerate(threads):
                thread.start()
                wait_until(lambda most=number: len(run._line._unread) > most)
            ready.set()
            for thread in threads:
                thread.join()

        started, ready = threading.Event(), threading.Event()
        run, requests = Played(agent, {}, HERMES), []
        started.set()
        try:
            await asyncio.to_thread(ready.wait, limit(60))
            for said, digest in zip("abc", expected or ("", "", ""), strict=True):
                requests.append(await run.requested(digest))
                run.answer(turn(said))
            assert await run.requested() is None
        finally:
            await run.close()
        return requests

    first = asyncio.run(asyncio.wait_for(played("321"), limit(60)))
    assert got == {"3": "a", "2": "b", "1": "c"}
    digests = (request["digest"] for request in first)
    again = asyncio.run(asyncio.wait_for(played(asks, *digests), limit(60)))
    assert [got[name] for name in asks] == [*gets]
    assert again[-1]["drifted"] is drifted


def test_a_request_that_was_given_up_is_as_if_it_had_not_been_made() -> None:
    asked = threading.Event()

    def agent(base_url: str) -> str:
        hang_up(base_url, json.dumps(FINE).encode(), asked.is_set)
        return ask(base_url, [user("later")])["choices"][0]["message"]["content"]

    async def played() -> list[dict[str, str]]:
        run = Played(agent, {}, HERMES)
        try:
            await asyncio.to_thread(wait_until, lambda: bool(run._line._unread))
            asked.set()
            await asyncio.to_thread(wait_until, lambda: len(run._line._unread) > 1)
            request = await run.requested()
            run.answer(turn("heard"))
            assert await run.requested() is None
        finally:
            await run.close()
        return request["messages"]

    assert asyncio.run(asyncio.wait_for(played(), limit(60))) == [user("later")]


def test_what_waits_when_there_are_no_more_turns_is_refused_as_all_that_follows() -> None:
    refused: list[tuple[int, str, str]] = []

    def agent(base_url: str) -> float:
        refused.extend(error_of(send(base_url, FINE)) for _ in range(2))
        return 0.75

    async def played() -> float | None:
        run = Played(agent, {}, HERMES)
        await run.requested()
        try:
            return await run.finish()
        finally:
            await run.close()

    assert asyncio.run(asyncio.wait_for(played(), limit(60))) == 0.75
    assert refused == [(400, "context_length_exceeded", OUT_OF_TOKENS)] * 2


@pytest.mark.parametrize("refused", [False, True])
def test_what_an_agent_raises_is_a_reward_of_0_only_where_it_was_refused(refused: bool) -> None:
    def agent(base_url: str) -> float:
        ask(base_url, [user("a")])
        if refused:
            ask(base_url, [user("b")])
        raise KeyError("seven")

    if refused:
        assert play(agent, turn("Seven."))[1] == 0.0
    else:
        with pytest.raises(KeyError, match="seven"):
            play(agent, turn("Seven."))


def test_after_its_end_a_run_is_not_found() -> None:
    addresses: list[str] = []
    play(lambda base_url: addresses.append(base_url))
    status, _, message = error_of(send(addresses[0], FINE))
    assert status == 404
    assert "ended" in message
    assert addresses[0].split("/")[-2] not in endpoint().lines
