"""Agents of the tests, as a user writes them: without an import of ours."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from typing import Any

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def post(base_url: str, messages: list[dict[str, Any]], key: str = "", **more: Any) -> dict[str, Any]:
    """The first choice of a response."""
    body = json.dumps({"model": "policy", "messages": messages, **more}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    with OPENER.open(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as response:
        return json.loads(response.read())["choices"][0]


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def digit(key: str, skipped: int = 0) -> int:
    """What the environments of a run with seed 0 draw after they were seeded with this key."""
    generator = random.Random(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big"))
    return [generator.randint(0, 9) for _ in range(skipped + 1)][skipped]


def count(base_url: str, id: str, prompt: str, **row: object) -> float:
    """Says and earns what `made_environments.Counter` does."""
    secret, told, messages = digit(f"0/{id}"), 0, [user(prompt)]
    while True:
        choice = post(base_url, messages)
        # A turn that ended otherwise made no call.
        if choice["token_ids"][-1] != CLOSE:
            return told + secret / 10
        told += 1
        if told > 3:
            return told - 1 + secret / 10
        reply = f"{told}{secret}{digit(f'0/{id}/{told - 1}')}"
        messages += [choice["message"], user(reply)]


CLOSE = 7 + "0123456789+-*=:; ?\n".index("=")
"""Token of the tests' runs that ends a call."""


async def count_async(base_url: str, **row: Any) -> float:
    return await asyncio.to_thread(count, base_url, **row)


def forgetful(base_url: str, prompt: str, **row: object) -> float:
    """Begins anew after each turn but every third, with what was said last."""
    messages, turns = [user(prompt)], 0
    try:
        for turns in range(6):
            choice = post(base_url, messages)
            said = choice["message"]["content"]
            messages = [user(f"{turns}:{said[-3:]}?")] if turns % 3 < 2 else [*messages, choice["message"], user(";")]
    except urllib.error.HTTPError as error:
        if json.loads(error.read())["error"]["code"] != "context_length_exceeded":
            raise
    return float(turns)


def hostile(base_url: str, prompt: str, answer: str, **row: object) -> Any:
    """Does what the problem's answer says, after its first turn if it is nothing to do before; its reward is otherwise
    the number of turns that it got, one at most for each letter of the prompt."""
    if answer == "nothing":
        return 1.0
    if answer == "early":
        raise ValueError("no board")
    chat, turns = [user(f"{time.time_ns()}" if answer == "clock" else prompt)], 0
    if answer == "much":
        chat = [user("7" * 10_000_000)]
    while turns < len(prompt):
        try:
            chat.append(post(base_url, chat)["message"])
        except urllib.error.HTTPError:
            if answer == "stubborn" or (answer == "stuck" and turns):
                threading.Event().wait()
            if answer == "kept":
                return turns + 0.5
            raise
        turns += 1
        if answer in AFTER:
            return AFTER[answer](base_url)
        said = {"big": "7" * 10_000_000, "special": "<eos>7<answer>=<bos>", "who": str(os.getpid())}
        said["echo"] = "".join(message["content"] for message in chat if message["role"] == "assistant")
        chat.append(user(said.get(answer, str(turns) if answer != "asks the time" else str(time.time_ns()))))
    return float(turns)


def fail(base_url: str) -> None:
    raise ValueError("no luck")


def leave(base_url: str) -> None:
    raise SystemExit(4)


def fork(base_url: str) -> float:
    """Both return."""
    return 2.0 if os.fork() else 3.0


def ask_beside(base_url: str) -> float:
    """Returns while a request may be under way."""
    threading.Thread(target=post, args=(base_url, [user("5")]), daemon=True).start()
    return 2.0


AFTER = {
    "raise": fail,
    "nan": lambda _: float("nan"),
    "text": lambda _: "one",
    "none": lambda _: None,
    "hang": lambda _: threading.Event().wait(),
    "exit": lambda _: os._exit(3),
    "leave": leave,
    "fork": fork,
    "beside": ask_beside,
}
"""What `hostile` may do after its first turn."""


async def hostile_async(base_url: str, prompt: str, answer: str, **row: Any) -> Any:
    """The same, but it waits, and forks, in the event loop of all agents."""
    if answer not in ("hang", "fork"):
        return await asyncio.to_thread(hostile, base_url, prompt, answer, **row)
    await asyncio.to_thread(post, base_url, [user(prompt)])
    return fork(base_url) if answer == "fork" else await asyncio.Event().wait()


def warm(base_url: str, prompt: str, **row: object) -> float:
    """Says how its turns should be sampled."""
    post(base_url, [user(prompt)], temperature=0.5, top_p=1)
    post(base_url, [user("7")], temperature=0.5, max_tokens=9)
    return 1.0


def through_proxies(base_url: str, prompt: str, **row: object) -> float:
    """Asks as most clients do, by way of the proxy in `http_proxy`, if there is one."""
    body = json.dumps({"messages": [user(prompt)]}).encode()
    with urllib.request.urlopen(f"{base_url}/chat/completions", body) as response:
        return float(len(json.loads(response.read())["choices"]))


def with_openai(base_url: str, api_key: str, prompt: str, **row: object) -> float:
    """Goes on as long as it gets turns, with the client of OpenAI; its reward is their number."""
    from openai import BadRequestError, OpenAI

    client, chat, turns = OpenAI(base_url=base_url, api_key=api_key), [user(prompt)], 0
    try:
        while True:
            message = client.chat.completions.create(model="policy", messages=chat).choices[0].message
            turns += 1
            chat += [message, user("7:")]
    except BadRequestError as error:
        if error.code != "context_length_exceeded":
            raise
    return float(turns)


async def with_openai_async(base_url: str, api_key: str, prompt: str, **row: object) -> float:
    """The same, and its history is what a client keeps of it."""
    from openai import AsyncOpenAI, BadRequestError

    client, chat, turns = AsyncOpenAI(base_url=base_url, api_key=api_key), [user(prompt)], 0
    try:
        while True:
            response = await client.chat.completions.create(model="policy", messages=chat, logprobs=True)
            (choice,) = response.choices
            assert response.usage.completion_tokens == len(choice.logprobs.content) > 0
            turns += 1
            chat += [choice.message.model_dump(), user("7:")]
    except BadRequestError as error:
        if error.code != "context_length_exceeded":
            raise
    return float(turns)
