"""Episodes: what an environment says before and after the turns of a sample. Runs in a guarded process, never in the
trainer's.

An answer is a function of the problem, the seed and the calls so far. The object of an episode is kept between two of
its calls, but nothing depends on that: where it is missing, as after a resume or on another rank, the earlier calls are
made again on a new one.

Functions that may wait for what the user has declared as `async def` are coroutines; without any such they never wait,
and run without an event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from grpo_mega.environment.calls import (
    AGENT,
    JSON_CALL,
    KEY,
    VARIABLE,
    BadCall,
    Kind,
    argument_alone,
    calls_in,
    calls_of_sglang,
    is_stepped,
    load,
    read_call,
    schemas,
)
from grpo_mega.environment.stepped import Stepped
from grpo_mega.errors import InputError
from grpo_mega.reward.user_worker import LOOP, seed_all, without_loop
from grpo_mega.reward.verdict import read_verdict
from grpo_mega.types import Prompt

SECONDS_TO_CLOSE = 2.0
"""Seconds that an async `close` may take."""
KEPT = 1024
"""Number of episodes whose objects a process keeps."""
_kept: OrderedDict[str, tuple[Any, list[str | None]]] = OrderedDict()

kind_of = cache(load)


@cache
def _schemas(path: str) -> list[dict[str, Any]]:
    return schemas(kind_of(path))


def check(path: str, parser: str | None) -> dict[str, Any]:
    """Whether the environment is an "agent" and whether it "rewards", whether it "opens" problems, and "closes"
    episodes, the fields of a problem that `reset`, or the agent, "needs" and "takes", the latter None if it takes any,
    the names of its "tools", how a "call" is written, whether it may be "bare" text, and whether its calls are "async".

    Raises as `load`, `schemas` and `calls_of_sglang` do, and whatever making an object raises; InputError for a parser
    where the raw text of a turn is the action.
    """
    kind = kind_of(path)
    if parser is not None:
        if is_stepped(kind):
            where, what = f"environment.tool_call_parser={parser}", "the action of this environment is the raw text"
            raise InputError(where, f"{what} of a turn", "set null")
        calls_of_sglang("", "", parser, [] if kind.agent else _schemas(path))
    can: dict[str, Any] = {"agent": kind.agent is not None, "tools": [*kind.tools], "async": kind.is_async}
    can |= {"rewards": kind.agent or hasattr(kind.make, "get_reward"), "opens": kind.agent or kind.make}
    can |= {"closes": kind.agent, "needs": [], "takes": None, "bare": True, "call": "read by the agent"}
    begins = kind.agent
    if not kind.agent:
        argument = argument_alone(kind)
        can["bare"], can["call"] = argument, f"{argument} alone, or {JSON_CALL}" if argument else JSON_CALL
    if kind.make:
        made = LOOP.run(_tried(kind)) if kind.is_async else without_loop(_tried(kind))
        can["closes"], begins = hasattr(made, "close"), made.reset
        if isinstance(made, Stepped):
            # The whole call is what to do; its tool has no name.
            can["tools"], can["bare"], can["call"] = [], True, "what to do"
    if begins:
        named = [one for one in inspect.signature(begins).parameters.values() if one.name not in (AGENT, KEY)]
        can["needs"] = [one.name for one in named if one.default is one.empty and one.kind not in VARIABLE]
        if not any(one.kind is one.VAR_KEYWORD for one in named):
            can["takes"] = [one.name for one in named]
    return can | {name: bool(can[name]) for name in ("rewards", "opens", "closes", "bare")}


async def _tried(kind: Kind) -> Any:
    """An object, already closed."""
    assert kind.make
    made = kind.make()
    await _close(made)
    return made


def calls(turn: str, close: str, path: str, parser: str) -> str:
    """The calls of a turn, see `calls_of_sglang`."""
    return calls_of_sglang(turn, close, parser, _schemas(path))


async def opening(row: dict[str, Any], seed: str, path: str, longest: int) -> str:
    """What a class adds to a problem before the first turn: the text that `reset` returns, or nothing.

    Raises:
        ValueError: It returned something else, or more than `longest` characters.
    """
    kind = kind_of(path)
    assert kind.make
    seed_all(seed)
    episode = kind.make()
    try:
        said = await _now(episode.reset(**row), kind, "reset")
    finally:
        await _close(episode)
    if said is not None and not isinstance(said, str):
        raise ValueError(f"reset returned {type(said).__name__}, not str or None")
    if said and len(said) > longest:
        raise ValueError(f"reset returned {len(said):,} characters, more than model.context has room for")
    return said or ""


async def reply(
    row: dict[str, Any],
    key: str,
    seed: str,
    calls: Sequence[str | None],
    path: str,
    longest: int,
    cpu_seconds: float | None = None,
    replayable: bool = True,
) -> dict[str, Any]:
    """The environment's reply to the last of these calls of an episode.

    Args:
        row: Fields of the problem, the keyword arguments of `reset`.
        key: Name of the episode.
        seed: Seeds random generators, with the number of the call; the same for all episodes of a group.
        calls: Content of all calls so far; None for one that was undone.
        path: The environment.
        longest: Characters that a text may have; of a longer one the middle is left out.
        cpu_seconds: CPU seconds that a call may take: one that takes more is ended with this process, by SIGPROF.
        replayable: Whether an episode can be rebuilt by making its calls again.

    Returns:
        "text" of the reply, whether it is an "error" of the model, which it should read, whether the episode is "done",
        and the "reward" of the turn, 0 for an error. The last two are attributes of the object after the call; without
        them, false and None.

    Raises:
        NoVerdict: The reward is not a finite number.
        RuntimeError: The object of the episode is lost, and cannot be rebuilt.
    """
    kind = kind_of(path)
    *earlier, turn = calls
    assert turn is not None
    episode = await _episode(kind, row, key, seed, earlier, replayable)
    # The signal's default action also ends a call that never returns to Python, such as a long multiplication. Of
    # calls that are made at once nobody knows whose the time is.
    if limited := not kind.is_async:
        signal.setitimer(signal.ITIMER_PROF, (cpu_seconds or 0.0) * len(calls_in(turn)))
    try:
        said = await _turn(kind, episode, f"{seed}/{len(earlier)}", turn)
    # What is not the model's to read ends the episode.
    except BaseException:
        await _close(episode)
        raise
    finally:
        if limited:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
    _kept[key] = episode, [*calls]
    while len(_kept) > KEPT:
        _, (oldest, _) = _kept.popitem(last=False)
        await _close(oldest)
    text, half = str(said["text"]), longest // 2
    return said | {"text": text if len(text) <= longest else text[:half] + text[-half:]}


async def reward(
    row: dict[str, Any], key: str, seed: str, calls: Sequence[str | None], path: str, replayable: bool = True
) -> float | None:
    """The environment's reward of an episode that ends after these calls, from `get_reward`; closes the episode.

    Raises:
        NoVerdict: It is neither a finite number nor None.
        RuntimeError: As in `reply`.
    """
    kind = kind_of(path)
    episode = await _episode(kind, row, key, seed, calls, replayable)
    try:
        value = await _now(episode.get_reward(), kind, "get_reward") if hasattr(episode, "get_reward") else None
        return None if value is None else read_verdict(value).value
    finally:
        await _close(episode)


async def end(key: str, path: str) -> None:
    """Closes an episode whose reward nobody asks for; every function here gets the path."""
    episode, _ = _kept.pop(key, (None, None))
    await _close(episode)


def episode_of(prompt: Prompt, run_seed: int) -> tuple[dict[str, Any], str]:
    """(row, seed) of the episodes of a group, see `reply`."""
    row = {**prompt.metadata, "id": prompt.id, "task": prompt.task, "prompt": prompt.asked, "answer": prompt.answer}
    return row, f"{run_seed}/{prompt.id}"


async def _episode(
    kind: Kind, row: dict[str, Any], key: str, seed: str, calls: Sequence[str | None], replayable: bool
) -> Any:
    """The object of an episode after these calls; None for functions."""
    if kind.make is None:
        return None
    kept, done = _kept.pop(key, (None, None))
    if done == [*calls]:
        return kept
    await _close(kept)
    if calls and not replayable:
        raise RuntimeError("the episode's object is lost, and environment.replayable=false")
    # Seeded before every call, so that a reply does not depend on whether the object was kept.
    seed_all(seed)
    episode = kind.make()
    try:
        await _now(episode.reset(**row), kind, "reset")
        for number, turn in enumerate(calls):
            if turn is not None:
                await _turn(kind, episode, f"{seed}/{number}", turn)
    except BaseException:
        await _close(episode)
        raise
    return episode


async def _turn(kind: Kind, episode: Any, seed: str, turn: str) -> dict[str, Any]:
    """See `reply`. Of several calls, texts are joined by line ends, rewards added up, and none follows the end."""
    seed_all(seed)
    texts: list[str] = []
    wrong, rewards = False, []
    done: Any = None
    for number, call in enumerate(calls_in(turn)):
        # While the call before has waited, other episodes have drawn.
        if kind.is_async and number:
            seed_all(f"{seed}/{number}")
        failed = False
        try:
            name, arguments = _read(call, kind, episode)
            own = () if episode is None else (episode,)
            texts.append(str(await _now(kind.tools[name](*own, **arguments), kind, name)))
        # Whatever a tool raises is the model's to read: it gave the arguments.
        except Exception as error:
            what = "" if isinstance(error, BadCall) else f"{type(error).__name__}: "
            texts.append(f"error: {what}{error}")
            wrong = failed = True
        # A method of such a name is a tool.
        done, value = (None if callable(one := getattr(episode, name, None)) else one for name in ("done", "reward"))
        if value is not None:
            # An error may have left the reward of the call before.
            rewards.append(0.0 if failed else read_verdict(value).value)
        if done:
            break
    return {
        "text": "\n".join(texts),
        "error": wrong,
        "done": bool(done),
        "reward": sum(rewards) if rewards else None,
    }


def _read(call: str, kind: Kind, episode: Any) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call, see `read_call`; of a stepped environment whatever does not name its `step` is an
    action."""
    try:
        return read_call(call, kind)
    except BadCall:
        if isinstance(episode, Stepped):
            return "step", {"action": call}
        raise


async def _close(episode: Any) -> None:
    # Not even what would end the process: the call may be another episode's.
    with suppress(BaseException):
        closed = episode.close() if hasattr(episode, "close") else None
        if inspect.isawaitable(closed):
            await asyncio.wait_for(closed, SECONDS_TO_CLOSE)


class NotAsync(BaseException):
    """Error: a function that is not declared as `async def` has returned what must be awaited.

    No Exception, as it is not the model's to read.
    """


async def _now(returned: Any, kind: Kind, name: str) -> Any:
    """What the user's function of this name returned, or what it returns when it is done if it is async."""
    if not inspect.isawaitable(returned):
        return returned
    if not kind.is_async:
        if inspect.iscoroutine(returned):
            returned.close()
        raise NotAsync(f"{name} returns what must be awaited; write it as `async def {name}`")
    return await returned
