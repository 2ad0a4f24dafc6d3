"""Agents: programs with a loop of their own, which request the policy's turns from an OpenAI-compatible endpoint.

An agent is an environment turned inside out: what it requests next is the reply to the policy's turn. So the turns come
from the run's engine, the trainer keeps the tokens as they were sampled, and the endpoint (endpoint.py), which runs in
the agents' guarded process, only passes messages on.

An agent's requests follow from the problem and the turns so far, as far as it makes them do so. Where its run is
missing, as after a resume or on another rank, it is started again and gets the earlier turns once more.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from typing import Any

from grpo_mega.environment.calls import AGENT, KEY
from grpo_mega.environment.endpoint import CallFormat, Line, Request, endpoint, plain, response
from grpo_mega.environment.episode import kind_of
from grpo_mega.reward.verdict import read_verdict

KEPT = 1024
"""Number of agents that a process keeps."""
SECONDS_TO_END = 1.0
"""Seconds that an agent may take to end once its requests are refused; less than a call has to end after its limit, so
that a process ends itself in a call of the agent that makes it do so, and not in another's."""
MOST_LEFT = 8
"""Number of agents that do not end with which a process goes on; with one more it ends itself."""
OUT_OF_TOKENS = "the sample has no tokens left: environment.max_calls, rollout.max_new_tokens or model.context"
_kept: OrderedDict[str, Played] = OrderedDict()
_left: list[Future[Any]] = []
"""Agents that did not end in time."""


class Played:
    """One run of an agent, which plays an episode.

    Attributes:
        turns: Number of turns that it got.
        ended: Whether it has returned.
    """

    def __init__(self, agent: Callable[..., Any], row: Mapping[str, Any], form: CallFormat) -> None:
        """Starts the agent on a problem with these fields."""
        self._form, self.turns, self.ended, self._value = form, 0, False, None  # the last is what it returns
        self._line = Line(asyncio.get_running_loop())
        self._request: Request | None = None  # the one that waits for a turn
        self._seen: list[dict[str, Any]] = []  # messages of the request before, and its answer
        self._tools: list[dict[str, Any]] = []
        self._run: Future[Any] = Future()
        self._run.add_done_callback(self._line.put)
        arguments = {**row, AGENT: f"{endpoint().add(self._line)}/v1"}
        if KEY in inspect.signature(agent).parameters:
            arguments[KEY] = self._line.key
        self._task: Future[None] | None = None
        if inspect.iscoroutinefunction(inspect.unwrap(agent)):
            self._task = asyncio.run_coroutine_threadsafe(self._awaited(agent(**arguments)), _loop())
        else:
            threading.Thread(target=self._called, args=(agent, arguments), daemon=True).start()

    def _called(self, agent: Callable[..., Any], arguments: dict[str, Any]) -> None:
        with self._ending():
            self._value = agent(**arguments)

    async def _awaited(self, work: Coroutine[Any, Any, Any]) -> None:
        with self._ending():
            self._value = await work

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Tells of the agent's end, however it comes."""
        me, failure = os.getpid(), None
        try:
            yield
        # SystemExit would end only this thread, and nobody would learn of it.
        except BaseException as error:
            failure = error
        # A fork of the agent shares the event loops, and would go on with other agents.
        if os.getpid() != me:
            os._exit(0)
        if failure:
            self._run.set_exception(failure)
        else:
            self._run.set_result(None)

    async def requested(self) -> dict[str, Any] | None:
        """The agent's next request: its "messages" and "tools", and how many of the messages are "new", the others
        being those of the request before and the answer that it got; None once the agent has returned.

        "new" is None where earlier messages, or the tools, have changed. "ignored" has fields that change nothing.

        Raises:
            BaseException: What the agent raised.
        """
        event = await self._line.events.get()
        if isinstance(event, Future):
            self.ended = True
            event.result()
            return None
        self._request, seen, tools, self._tools = event, self._seen, self._tools, event.tools
        goes_on = len(event.messages) > len(seen) > 0 and event.messages[: len(seen)] == seen and event.tools == tools
        new = len(event.messages) - len(seen) if goes_on else None
        return {"messages": event.messages, "tools": event.tools, "new": new, "ignored": event.ignored}

    def answer(self, turn: Mapping[str, Any]) -> None:
        """Answers the request that waits with a turn of the policy, see `response`."""
        assert self._request, "a request waits"
        request, self._request = self._request, None
        message = self._form.message(turn["text"], request, self.turns)
        self._seen = [*request.messages, plain(message)]
        self.turns += 1
        request.answer.set_result(response(request, message, turn, f"chatcmpl-{self._line.key}-{self.turns}"))

    async def finish(self) -> float | None:
        """The reward that the agent returns, without further turns; 0 if it raises because it gets none.

        Raises:
            NoVerdict: It returned neither a finite number nor None.
            BaseException: What the agent raised, unless a request had been refused.
        """
        self._line.refuse(OUT_OF_TOKENS)
        try:
            while not self.ended:
                await self.requested()
        except Exception:
            if not self._line.refused:
                raise
            return 0.0
        return None if self._value is None else read_verdict(self._value).value

    async def close(self) -> None:
        """Ends the agent. Threads cannot be ended: with too many that go on, the process ends."""
        endpoint().remove(self._line)
        if self._task:
            self._task.cancel()
        until = time.monotonic() + SECONDS_TO_END
        while not self._run.done() and time.monotonic() < until:
            await asyncio.sleep(0.01)
        if not self._run.done():
            _left[:] = [run for run in (*_left, self._run) if not run.done()]
            if len(_left) > MOST_LEFT:
                print(f"{len(_left)} agents go on after their episodes have ended", flush=True)
                os._exit(1)


async def agent_opening(row: dict[str, Any], path: str, form: Mapping[str, Any], longest: int) -> str:
    """The first request of an agent, see `Played.requested`, as JSON; it gets no answer.

    Raises:
        ValueError: The agent returned without a request, or the request has more than `longest` characters.
        BaseException: What the agent raised.
    """
    played = Played(_agent(path), row, CallFormat(**form))
    try:
        first = await played.requested()
    finally:
        await played.close()
    if first is None:
        raise ValueError("the agent returned without a request to base_url")
    if len(said := json.dumps(first)) > longest:
        raise ValueError(f"the agent's request has {len(said):,} characters, more than model.context has room for")
    return said


async def agent_reply(
    row: dict[str, Any],
    key: str,
    turns: Sequence[Mapping[str, Any]],
    first: str,
    path: str,
    form: Mapping[str, Any],
    replayable: bool,
) -> dict[str, Any] | None:
    """What the agent requests after these turns of an episode, see `Played.requested`.

    Args:
        row: Fields of the problem, the agent's keyword arguments.
        key: Name of the episode.
        turns: All turns so far, see `response`.
        first: The first request of the group's agents, from `agent_opening`.
        path: The agent.
        form: Fields of `CallFormat`.
        replayable: Whether the agent may be started again.

    Raises:
        RuntimeError: The agent's run is lost and may not be repeated, or was repeated and took another course.
        BaseException: What the agent raised.
    """
    played = await _played(row, key, turns[:-1], first, path, form, replayable)
    try:
        played.answer(turns[-1])
        request = await played.requested()
    except BaseException:
        await played.close()
        raise
    _kept[key] = played
    while len(_kept) > KEPT:
        await _kept.popitem(last=False)[1].close()
    return request


async def agent_reward(
    row: dict[str, Any],
    key: str,
    turns: Sequence[Mapping[str, Any]],
    first: str,
    last: Mapping[str, Any] | None,
    path: str,
    form: Mapping[str, Any],
    replayable: bool,
) -> float | None:
    """What the agent returns when the episode ends after these turns; `last` is one that it has not got yet.

    Raises as `agent_reply` and `Played.finish`.
    """
    played = await _played(row, key, turns, first, path, form, replayable)
    try:
        if last and not played.ended:
            played.answer(last)
        return await played.finish()
    finally:
        await played.close()


async def agent_end(key: str, path: str) -> None:
    """Ends the agent of an episode whose reward nobody asks for; every function here gets the path."""
    if played := _kept.pop(key, None):
        await played.close()


async def _played(
    row: dict[str, Any],
    key: str,
    turns: Sequence[Mapping[str, Any]],
    first: str,
    path: str,
    form: Mapping[str, Any],
    replayable: bool,
) -> Played:
    """The run of the agent that has got these turns."""
    kept = _kept.pop(key, None)
    if kept and kept.turns == len(turns):
        return kept
    if kept:
        await kept.close()
    if turns and not replayable:
        raise RuntimeError("the agent's run is lost, and environment.replayable=false")
    played, expected = Played(_agent(path), row, CallFormat(**form)), json.loads(first)
    try:
        request = await played.requested()
        if request is None or any(request[name] != expected[name] for name in ("messages", "tools")):
            what = "the agent's first request differs from that of its problem, whose samples begin alike"
            raise RuntimeError(f"{what}: make it depend on the problem alone, not on a clock, a path or chance")
        for turn in turns:
            if played.ended:
                raise RuntimeError("the agent was started again with the same turns, and returned earlier than before")
            played.answer(turn)
            await played.requested()
    except BaseException:
        await played.close()
        raise
    return played


def _agent(path: str) -> Callable[..., Any]:
    agent = kind_of(path).agent
    assert agent, "only the functions of an agent are asked"
    return agent


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all `async` agents, in a thread of its own: they go on while nobody asks for their requests."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop
