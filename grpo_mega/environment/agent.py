"""Agents: programs with their own loop, which request the policy's turns from an OpenAI-compatible endpoint.

An agent is an environment turned inside out: what it requests next is the reply to the policy's turn. So the turns come
from the run's engine, the trainer keeps the tokens as they were sampled, and the endpoint (endpoint.py), which runs in
the agents' guarded process, only passes messages on.

Where an agent's run is missing, as after a resume or on another rank, it is started again and gets the earlier turns
once more, each for the request that it has answered. Where that does not come again, it answers what comes instead.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import threading
import time
from collections import OrderedDict, deque
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
"""Seconds for which the end of an agent is waited for, once its requests are refused."""
MOST_LEFT = 8
"""Number of agents that never end with which a process goes on; with one more it ends itself."""
SECONDS_TO_AGREE = 1.0
"""Seconds for which the request that a turn has answered is waited for, once another has come."""
DIFFERS = (
    "the agent's first request differs from that of its problem, whose samples begin alike: make it depend on the "
    "problem alone, not on a clock, a path or chance"
)
OUT_OF_TOKENS = "the sample has no tokens left: environment.max_calls, rollout.max_new_tokens or model.context"
_kept: OrderedDict[str, Played] = OrderedDict()
_left: list[tuple[Future[Any], float]] = []
"""Agents that did not end in time, and when they count as such that never end."""


class Played:
    """One run of an agent, which plays an episode.

    Attributes:
        turns: The texts of the turns that it got.
        ended: Whether it has returned.
    """

    def __init__(
        self, agent: Callable[..., Any], row: Mapping[str, Any], form: CallFormat, patience: float = 60.0
    ) -> None:
        """Starts an agent on a problem with these fields; one that still runs `patience` seconds after its requests are
        refused is taken for one that never ends."""
        self._form, self._patience, self._drifted = form, patience, False
        self.turns, self.ended, self._value = list[str](), False, None  # the last is what it returns
        self._line = Line(asyncio.get_running_loop())
        self._request: Request | None = None  # the one that waits for a turn
        self._aside: deque[Request] = deque()  # those that came before one that was expected
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

    async def requested(self, expected: str = "", strictly: bool = False) -> dict[str, Any] | None:
        """The agent's next request: its "messages" and "tools", and how many of the messages are "new", the others
        being those of the request before and the answer that it got; None once the agent has returned.

        "new" is None where earlier messages, or the tools, have changed. "ignored" has fields that change nothing,
        "digest" identifies messages and tools. Other requests wait for the `expected` one, and are taken instead if it
        does not come, unless `strictly`: then the agent has "drifted".

        Raises:
            RuntimeError: The expected request does not come.
            BaseException: What the agent raised.
        """
        event = next((one for one in self._aside if expected in ("", one.digest)), None)
        if event:
            self._aside.remove(event)
        while event is None:
            waits = SECONDS_TO_AGREE if expected and self._aside else None
            try:
                came = await asyncio.wait_for(self._line.events.get(), waits)
            except TimeoutError:
                if strictly:
                    raise RuntimeError(DIFFERS) from None
                event, self._drifted = self._aside.popleft(), True
                continue
            if isinstance(came, Future):
                self.ended = True
                came.result()
                if expected:
                    raise RuntimeError("the agent was started again with the same turns, and returned earlier")
                return None
            if expected not in ("", came.digest):
                self._aside.append(came)
            elif not self._line.given_up(came):
                event = came
        self._request, seen, tools, self._tools = event, self._seen, self._tools, event.tools
        goes_on = len(event.messages) > len(seen) > 0 and event.messages[: len(seen)] == seen and event.tools == tools
        new = len(event.messages) - len(seen) if goes_on else None
        about = {"new": new, "ignored": event.ignored, "digest": event.digest, "drifted": self._drifted}
        return {"messages": event.messages, "tools": event.tools} | about

    def answer(self, turn: Mapping[str, Any]) -> None:
        """Answers the request that waits with a turn of the policy, see `response`."""
        assert self._request, "a request waits"
        request, self._request = self._request, None
        message = self._form.message(turn["text"], request, len(self.turns))
        self._seen = [*request.messages, plain(message)]
        self.turns.append(turn["text"])
        request.answer.set_result(response(request, message, turn, f"chatcmpl-{self._line.key}-{len(self.turns)}"))

    @property
    def refusal(self) -> str:
        """The end of a message: why a request was refused, if one was."""
        return f"; one was refused: {self._line.last_refusal}" if self._line.last_refusal else ""

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

    async def close(self, wait: float = SECONDS_TO_END) -> None:
        """Ends the agent. Threads cannot be ended: with too many that never end, the process ends."""
        endpoint().remove(self._line)
        if self._task:
            self._task.cancel()
        until = time.monotonic() + wait
        while not self._run.done() and time.monotonic() < until:
            await asyncio.sleep(0.01)
        _left[:] = [(run, since) for run, since in (*_left, (self._run, until + self._patience)) if not run.done()]
        if sum(since < until for _, since in _left) > MOST_LEFT:
            print(f"{MOST_LEFT + 1} agents have not ended; do they ask again what was refused?", flush=True)
            os._exit(1)


async def agent_opening(row: dict[str, Any], longest: int, **of_agent: Any) -> str:
    """The first request of an agent, see `Played.requested`, as JSON; it gets no answer.

    Raises:
        ValueError: The agent returned without a request, or the request has more than `longest` characters.
        BaseException: What the agent raised.
    """
    played = _started(row, **of_agent)
    try:
        first = await played.requested()
    finally:
        # Its clean-up, or that it asks again for a while, keeps no other opening waiting.
        await played.close(wait=0.0)
    if first is None:
        raise ValueError(f"the agent returned without a request to base_url{played.refusal}")
    if len(said := json.dumps(first)) > longest:
        raise ValueError(f"the agent's request has {len(said):,} characters, more than model.context has room for")
    return said


async def agent_reply(
    row: dict[str, Any], key: str, turns: Sequence[Mapping[str, Any]], first: str, replayable: bool, **of_agent: Any
) -> dict[str, Any] | None:
    """What the agent requests after these turns of an episode, see `Played.requested`.

    Args:
        row: Fields of the problem, the agent's keyword arguments.
        key: Name of the episode.
        turns: All turns so far, see `response`; "then" is the digest of the request after it.
        first: The first request of the group's agents, from `agent_opening`.
        replayable: Whether the agent may be started again.
        of_agent: Further arguments of `_started`.

    Raises:
        RuntimeError: The agent's run is lost and may not be repeated, or was repeated and took another course.
        BaseException: What the agent raised.
    """
    played = await _played(row, key, turns[:-1], first, replayable, **of_agent)
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
    replayable: bool,
    **of_agent: Any,
) -> float | None:
    """What the agent returns when the episode ends after these turns; `last` is one that it has not got yet.

    Raises as `agent_reply` and `Played.finish`.
    """
    played = await _played(row, key, turns, first, replayable, **of_agent)
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
    row: dict[str, Any], key: str, turns: Sequence[Mapping[str, Any]], first: str, replayable: bool, **of_agent: Any
) -> Played:
    """The run of the agent that has got these turns."""
    kept = _kept.pop(key, None)
    if kept and kept.turns == [turn["text"] for turn in turns]:
        return kept
    if kept:
        await kept.close()
    if turns and not replayable:
        raise RuntimeError("the agent's run is lost, and environment.replayable=false")
    played = _started(row, **of_agent)
    try:
        await played.requested(json.loads(first)["digest"], strictly=True)
        for turn in turns:
            played.answer(turn)
            await played.requested(turn["then"])
    except BaseException:
        await played.close()
        raise
    return played


def _started(row: Mapping[str, Any], path: str, form: Mapping[str, Any], patience: float) -> Played:
    agent = kind_of(path).agent
    assert agent, "only the functions of an agent are asked"
    return Played(agent, row, CallFormat(**form), patience)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all `async` agents, in a thread of its own: they go on while nobody asks for their requests."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop
