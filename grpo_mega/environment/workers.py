"""Processes of an environment: guarded, and each asked from one thread, or many calls at once if it is async."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Timer
from typing import Any, TypeVar

from grpo_mega.config.schema import EnvironmentConfig
from grpo_mega.errors import InputError
from grpo_mega.reward.user_functions import IMPORT_SECONDS, Question, UserFunction, UserFunctions, import_fix
from grpo_mega.reward.user_worker import MOST_AT_ONCE

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

LATE = 30.0
"""Seconds after which an import, an opening, a reply or a reward that is still missing is announced."""
CHARACTERS = 16
"""Characters that a text may have for each of its tokens: of a longer reply the process leaves out the middle."""


class Workers:
    """Guarded processes that have imported the environment of a run; those of an async one make many calls at once.

    Attributes:
        can: What the environment is, from `episode.check`.
    """

    def __init__(self, config: EnvironmentConfig, context: int, seed: int, rewarded: bool) -> None:
        """Starts `config.at_once` processes; arguments as those of `Conversation`.

        Raises:
            InputError: The environment cannot be used.
            RuntimeError: As `UserFunctions.value`.
        """
        # Each process is started, and used, by one thread alone: it ends with the thread that has started it.
        self._threads = [ThreadPoolExecutor(1, "environment") for _ in range(config.at_once)]
        self._callers, self._questions = self._threads, [deque[Question]() for _ in self._threads]
        self._slow_import = f"environment.path={config.path}: not imported after {LATE:g} s, still waiting"
        # How much each thread was given, which this one counts, and how much it has begun, which it counts itself.
        self._given, self._begun = [0] * config.at_once, [0] * config.at_once
        starting = [thread.submit(_worker, config, context, seed, rewarded) for thread in self._threads]
        with announced(LATE, lambda: self._slow_import):
            failures = [failure for each in starting if (failure := each.exception())]
        started = [each.result() for each in starting if not each.exception()]
        self._each = [worker for worker, _ in started]
        if failures:
            self.close()
            raise failures[0]
        self.can: dict[str, Any] = started[0][1]
        # Each sample of an async environment has a thread, and that of the process asks the questions of all.
        if self.can["async"]:
            self._callers = [ThreadPoolExecutor(MOST_AT_ONCE, "calls") for _ in self._each]

    def submit(self, process: int, work: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Starts work in a thread that may ask this process, by `answer`."""

        def begin() -> Result:
            self._begun[process] += 1
            return work(*arguments)

        self._given[process] += 1
        return self._callers[process].submit(begin)

    def waiting(self, process: int) -> int:
        """How much submitted work waits for the process."""
        return 0 if self.can["async"] else self._given[process] - self._begun[process]

    def answer(self, process: int, what: str, arguments: tuple[Any, ...], seconds: float) -> Any:
        """What a function of `episode.py` returns in the process, within so many seconds; raises as
        `UserFunctions.value`."""
        if not self.can["async"]:
            return self._awake(process).value(what, *arguments, seconds=seconds)
        question = Question(what, arguments, seconds)
        self._questions[process].append(question)
        self._each[process].wake()
        self._threads[process].submit(self._serve, process)
        return question.answer.result()

    def end(self, process: int, key: str, seconds: float) -> None:
        """Closes an episode, if the process that has its object lives; raises as `answer`."""
        if self._each[process].alive:
            self.answer(process, "agent_end" if self.can["agent"] else "end", (key,), seconds)

    def _serve(self, process: int) -> None:
        """Has the questions that wait for a process answered, at once."""
        questions = self._questions[process]
        while questions:
            try:
                self._awake(process).serve(questions)
            # It cannot be started, or is closed.
            except Exception as error:
                while questions:
                    questions.popleft().answer.set_exception(error)

    def _awake(self, process: int) -> UserFunctions:
        """The process, once it has imported the environment, for which a new one may need longer than for a call."""
        worker = self._each[process]
        if not worker.alive:
            with announced(LATE, lambda: self._slow_import):
                worker.value("check", seconds=IMPORT_SECONDS)
        return worker

    def drop(self, pending: Sequence[Future[Any]]) -> None:
        """Drops submitted work, all that there is, and returns when what had begun is over."""
        for one in pending:
            one.cancel()
        for worker in self._each:
            worker.asks_again = False
        futures.wait(pending)
        for worker in self._each:
            worker.asks_again = True
        self._given = [*self._begun]

    def close(self) -> None:
        """Ends the processes; drops work that has not begun."""
        for thread in self._callers:
            thread.shutdown(wait=False, cancel_futures=True)
        for worker in self._each:
            worker.close()
        # These still refuse the questions that wait.
        for thread in self._threads:
            thread.shutdown(wait=False)


def _worker(config: EnvironmentConfig, context: int, seed: int, rewarded: bool) -> tuple[UserFunctions, dict[str, Any]]:
    """A process that has imported the environment, and what `episode.check` says of it."""
    where, path = f"environment.path={config.path}", str(config.path)
    replays = {"replayable": config.replayable}
    reply = {"longest": CHARACTERS * config.max_reply_tokens, "cpu_seconds": config.cpu_seconds}
    opening, parser = {"longest": CHARACTERS * context}, {"parser": config.tool_call_parser}
    form: dict[str, Any] = {"form": {"open": config.open, "close": config.close, **parser}, "patience": config.seconds}
    options: dict[str, dict[str, Any]] = {
        "episode:check": parser,
        "episode:calls": parser,
        "episode:opening": opening,
        "episode:reply": replays | reply,
        "episode:reward": replays,
        "episode:end": {},
        "agent:agent_opening": opening | form,
        "agent:agent_reply": replays | form,
        "agent:agent_reward": replays | form,
        "agent:agent_end": {},
    }
    functions = {
        name.partition(":")[2]: UserFunction(f"grpo_mega.environment.{name}", {"path": path, **own})
        for name, own in options.items()
    }
    worker = UserFunctions(functions, seed, config.seconds, restart=True)
    try:
        can = worker.value("check", seconds=IMPORT_SECONDS)
    except RuntimeError as error:
        worker.close()
        raise environment_error(where, path, error) from None
    if rewarded and not can["rewards"]:
        worker.close()
        fix = "write `def get_reward(self) -> float`, or remove the reward term environment"
        raise InputError(where, "has no method get_reward", fix)
    return worker, can


def environment_error(where: str, path: str, error: RuntimeError) -> InputError:
    """The error about an environment that cannot be used, from that of its process; the user's stack comes last."""
    if isinstance(error.__cause__, InputError):
        return error.__cause__
    return of_user(where, "", str(error), import_fix(path, str(error)))


def of_user(where: str, what: str, raised: str, fix: str) -> InputError:
    """The error about what a user's code raised, the first line of `raised`; its stack, the others, comes last."""
    first, _, stack = raised.partition("\n")
    return InputError(where, what + first, f"{fix}\n{stack}".rstrip())


@contextmanager
def announced(seconds: float, message: Callable[[], str]) -> Iterator[None]:
    """Context that logs a warning once it has lasted for so many seconds."""
    late = Timer(seconds, lambda: logger.warning(message()))
    # Nothing waits for the announcement.
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()
