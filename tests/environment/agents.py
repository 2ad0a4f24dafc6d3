"""Agents of the tests, as a user writes them: without an import of ours."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
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
