"""Conversation: the turns between the policy and an environment, seen from a rank.

A sample that ends with a call gets the environment's reply as given tokens, and goes on. Token ids are only appended:
what the model saw is what it learns from. Environments run in guarded processes (`workers.py`).

The reply of an agent (agent.py) is its next request: the messages after the policy's turn, or, if it has changed
earlier ones, the whole chat, with which the sample's context begins anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import torch.distributed as dist

from grpo_mega.config.schema import Config, EnvironmentConfig
from grpo_mega.data.stored import tokenizer_of
from grpo_mega.data.tokenizer import Tokenizer
from grpo_mega.environment.agent_chat import THOUGHTS, begun, check_chat, context_after, turns_of
from grpo_mega.environment.calls import calls_in, last_calls
from grpo_mega.environment.episode import episode_of
from grpo_mega.environment.journal import Journal
from grpo_mega.environment.workers import LATE, Workers, announced
from grpo_mega.errors import ConfigError, InputError
from grpo_mega.platform.collectives import from_all_ranks, to_each_rank
from grpo_mega.platform.trace import beside, span
from grpo_mega.reward.user_functions import OutOfCpu
from grpo_mega.rollout.engine import SLICE, TURN
from grpo_mega.types import Call, Prompt, Sample, Score

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

FAILURES = (RuntimeError, InputError, OSError)
"""What asking a process of the environment may raise."""
CUT = " ... "
"""What stands for the middle of a reply that was too long."""


class Conversation:
    """Turns of samples with the environment of a run.

    Attributes:
        is_agent: Whether the environment is an agent.
        stop_id: Token that ends a call.
        replayable: Whether an episode can be rebuilt by making its calls again.
        warnings: What to log at the start of a run.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        tokenizer: Tokenizer,
        context: int,
        seed: int,
        rewarded: bool = False,
        asking: Mapping[str, Tokenizer] | None = None,
    ) -> None:
        """Starts the processes, in each of which the environment is imported.

        Args:
            config: The environment.
            tokenizer: Encodes replies, and prompts.
            context: Largest number of tokens of a sample with its prompt.
            seed: The run's seed.
            rewarded: Whether the environment must give rewards.
            asking: Task -> tokenizer with the task's template, where it differs.

        Raises:
            InputError: The environment cannot be used, or the settings do not fit the tokenizer.
        """
        self._config, self._tokenizer, self._context, self._seed = config, tokenizer, context, seed
        self._asking, self.replayable = asking or {}, config.replayable
        # Ending a process would lose the other episodes that it has.
        self._cpu_seconds = config.cpu_seconds if config.replayable else None
        problems: list[BaseException] = []
        self._journal: Journal | None = None
        is_agent = False
        try:
            self._workers = Workers(replace(config, cpu_seconds=self._cpu_seconds), context, seed, rewarded)
            is_agent = self._workers.can["agent"]
        except FAILURES as error:
            problems.append(error)
        try:
            self._template, self.warnings = _template_of(config, tokenizer, is_agent)
            self.stop_id = _stop_id(config, tokenizer, self._template)
        except InputError as error:
            if not problems:
                self.close()
            problems.insert(0, error)
        if problems:
            refused = [error for error in problems if isinstance(error, InputError)]
            raise ConfigError.of(refused) if refused else problems[0]
        self._can, self._rewarded, self.is_agent = self._workers.can, rewarded, is_agent
        if self._can["async"]:
            self._cpu_seconds = None
        self.warnings += tuple(self._idle_parts())
        self._failed: dict[int, str] = {}
        self._pending: list[Future[Sample]] = []  # samples that will have replies
        self._undone = 0  # number of calls; the first is announced
        self._drifted = False  # whether that of an agent was announced
        self._ignored: set[str] = set()  # fields of an agent's requests that have been announced
        self._seconds: list[float] = []

    def _idle_parts(self) -> Iterator[str]:
        """Warns if no term asks for its rewards, or if every call has characters that the tokenizer lacks."""
        where = f"environment.path={self._config.path}"
        if self._can["rewards"] and not self._rewarded:
            unasked = "what it returns is not used" if self.is_agent else "its get_reward is never asked"
            yield f"{where}: {unasked}, as no reward term is `environment`"
        if self._config.tool_call_parser or self._can["bare"]:
            return
        try:
            self._tokenizer.encode('{"name":"","arguments":{}}')
        except InputError as error:
            said = f"no call can be right: it is {self._can['call']}, and the tokenizer lacks {error.where}"
            fix = "keep one tool with one argument, which can be called with bare text, or use another tokenizer"
            yield f"{where}: {said}; {fix}"

    def record(self, folder: Path, rank: int, step: int, saved: int) -> None:
        """From now on, what the environment says is recorded, and found again, in this rank's journal; see
        `Journal.begin`."""
        if self.replayable:
            self._journal = self._journal or Journal(folder, rank)
            self._journal.begin(step, saved)

    def _sync(self) -> None:
        """Returns when the replies that are now used are on disk."""
        if self._journal:
            self._journal.sync()

    def close(self) -> None:
        """Ends the processes; drops calls that have not begun."""
        if self._journal:
            self._journal.close()
        self._workers.close()

    def check_fields(self, prompts: Iterable[Prompt]) -> None:
        """Raises InputError if a problem lacks a field that the environment's `reset` needs, or has one that it does
        not take."""
        where, needs, takes = f"environment.path={self._config.path}", self._can["needs"], self._can["takes"]
        begins = "it" if self.is_agent else "reset"
        for prompt in prompts:
            row, _ = episode_of(prompt, self._seed)
            source = prompt.task if prompt.task in self._asking else "NAME"
            if lacking := [name for name in needs if name not in row]:
                what = f"{begins} needs {lacking[0]!r}, which the problem {prompt.id} of {prompt.task} does not have"
                fix = f"list its column in data.sources.{source}.metadata, or give the parameter a default"
                raise InputError(where, what, fix)
            if takes is not None and (strange := [name for name in row if name not in takes]):
                what = f"{begins} does not take {strange[0]!r}, a field of the problem {prompt.id} of {prompt.task}"
                raise InputError(where, what, "end its parameters with **row")

    def tools(self) -> str:
        """The tools, and how a call is written, in words."""
        config, names, call = self._config, ", ".join(self._can["tools"]) or "none by name", self._can["call"]
        if self.is_agent:
            return f"{config.path} is an agent: it requests turns, which end with {config.close} or a stop token"
        if config.tool_call_parser:
            return f"tools: {names}; calls are read as {config.tool_call_parser} writes them, up to {config.close}"
        begin = f"after the last {config.open}" if config.open else "from the beginning of a turn"
        return f"tools: {names}; a call is {call}, {begin} and up to {config.close}"

    def untold(self, prompt: Prompt) -> str:
        """A warning if the text of a prompt names none of the tools, which a model hardly finds by chance; else ""."""
        text, tools = self._tokenizer.decode(prompt.token_ids), self._can["tools"]
        if not tools or any(re.search(rf"\b{re.escape(name)}\b", text) for name in tools):
            return ""
        names = f"any of the tools {', '.join(tools)}" if len(tools) > 1 else f"the tool {tools[0]}"
        where = "data.system or the problem, or to the chat template in data.template_options.tools"
        return f"the prompt of {prompt.id} does not name {names}: describe what can be called in {where}"

    def opened(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts with what the environment's `reset` adds to each problem.

        Every rank must call it with the same prompts, and asks for some of them.
        """
        # Functions have nothing to add to a problem.
        if not self._can["opens"]:
            return [*prompts]
        rank, ranks = _rank_and_ranks()

        def ask() -> list[tuple[str, str]]:
            mine = range(rank, len(prompts), ranks)
            pending = [
                self._workers.submit(self._process_of(number), self._opening, prompts[number], number)
                for number in mine
            ]
            with span("environment", openings=len(pending)):
                openings = [future.result() for future in pending]
            self._sync()
            return openings

        of_ranks = _from_all_ranks(ask)
        opened = [self._with_opening(prompt, *of_ranks[i % ranks][i // ranks]) for i, prompt in enumerate(prompts)]
        failed = [prompt for prompt in opened if prompt.unopened]
        # All ranks know of all failures.
        if failed and rank == 0:
            said = "environment.path=%s: %s failed for %d of %d problems, whose samples get no score; of %s: %s"
            what = "the agent's first request" if self.is_agent else "reset"
            logger.warning(said, self._config.path, what, len(failed), len(prompts), failed[0].id, failed[0].unopened)
        return opened

    def _opening(self, prompt: Prompt, number: int) -> tuple[str, str]:
        """What the environment adds to a problem, and the error, if there was one."""
        process = self._process_of(number)
        try:
            row, seed = episode_of(prompt, self._seed)
            asked = ("agent_opening", (row,)) if self.is_agent else ("opening", (row, seed))
            text = self._value(asked[0], prompt, 0, [], "", asked[1], process)
        except FAILURES as error:
            return "", str(error)
        return encodable(text), ""

    def _with_opening(self, prompt: Prompt, opening: str, error: str) -> Prompt:
        """The prompt with an opening, or with the error, also if the opening cannot be encoded or has no room."""
        if error or not opening:
            return replace(prompt, unopened=error)
        try:
            # All ranks have all openings.
            if self.is_agent and _rank_and_ranks()[0] == 0:
                self._tell_ignored(json.loads(opening))
            text, ids = begun(prompt, opening, self._asking.get(prompt.task, self._tokenizer), self.is_agent)
        except InputError as refusal:
            return replace(prompt, unopened=str(refusal))
        if len(ids) >= self._context:
            room = f"model.context={self._context} has no room for a prompt of {len(ids):,} tokens"
            return replace(prompt, unopened=room)
        made: dict[str, Any] = {"request" if self.is_agent else "opening": opening}
        return replace(prompt, text=text, token_ids=tuple(ids), **made)

    def go_on(self, samples: Sequence[Sample], longest: int, wait: float | None = None) -> list[Sample]:
        """Answers the samples that ended with a call: they get the environment's reply, and the reason `TURN`.

        Returns the samples that this rank holds from now on. A sample that has no room for more after its call, having
        sampled `longest` tokens, ends as at a limit. Calls run concurrently, those of one episode always in the same
        process: its rank gets the samples, whichever rank held them. Every rank must call it; see `Replying.go_on`,
        also for `wait`.
        """
        ready: list[Sample] = []
        for sample in self._to_their_ranks(samples):
            if self._asks(sample):
                work = self._requested if self.is_agent else self._answered
                self._pending.append(self._workers.submit(self._process_of(sample.number), work, sample, longest))
            else:
                ready.append(sample)
        if wait != 0 and self._pending:
            with span("environment", replies=len(self._pending)):
                futures.wait(self._pending, wait, futures.ALL_COMPLETED if wait is None else futures.FIRST_COMPLETED)
        pending, self._pending = self._pending, []
        for one in pending:
            if one.done():
                ready.append(one.result())
            else:
                self._pending.append(one)
        self._sync()
        return sorted(ready, key=attrgetter("number"))

    def forget(self) -> None:
        """Drops the samples whose replies are missing. Calls under way are waited for: their failures must not count
        for samples that come later."""
        self._workers.drop(self._pending)
        self._pending, self._failed = [], {}

    def metrics(self) -> dict[str, float]:
        """Mean seconds of the calls since the last time, over all ranks; every rank must call it."""
        own, self._seconds = self._seconds, []
        seconds = [one for of_rank in from_all_ranks(lambda: own) for one in of_rank]
        return {"environment/seconds": fmean(seconds)} if seconds else {}

    def scores(self, score: Callable[[Sequence[Sample]], Sequence[Score]], samples: Sequence[Sample]) -> list[Score]:
        """Scores of finished samples, with the environment's reward where it gives one; a sample whose environment
        failed has no score."""
        if self._rewarded:
            pending = [self._workers.submit(self._process_of(one.number), self._with_reward, one) for one in samples]
            with span("environment", rewards=len(pending)):
                samples = [future.result() for future in pending]
            self._sync()
        if self._can["closes"]:
            # Asking for the reward has closed the others.
            kept = [one for one in samples if one.calls and (not self._rewarded or one.number in self._failed)]
            futures.wait([self._workers.submit(self._process_of(one.number), self._end, one) for one in kept])
        began = "first request" if self.is_agent else "reset"
        failed = [
            f"environment: {began}: {why}" if (why := sample.prompt.unopened) else self._failed.pop(sample.number, "")
            for sample in samples
        ]
        found = iter(score([sample for sample, why in zip(samples, failed, strict=True) if not why]))
        return [Score(0.0, {}, unscorable=why) if why else next(found) for why in failed]

    def _with_reward(self, sample: Sample) -> Sample:
        """The sample with the environment's reward; the episode is over."""
        if sample.number in self._failed or sample.prompt.unopened:
            return sample
        if self.is_agent:
            turns = turns_of(sample, self._tokenizer)
            last = turns.pop() if len(turns) > len(sample.calls) else None
            given = self._ask("agent_reward", sample, turns, *self._played(sample), turns, sample.prompt.request, last)
        else:
            given = self._ask("reward", sample, _made(sample))
        return sample if given is None else replace(sample, reward=given)

    def _end(self, sample: Sample) -> None:
        """Closes an episode whose reward nobody asks for. If that ends its process, it has its score all the same."""
        _, seed = episode_of(sample.prompt, self._seed)
        try:
            self._workers.end(self._process_of(sample.number), f"{seed}/{sample.index}", self._config.seconds)
        except FAILURES as error:
            said = "environment.path=%s: close of problem %s, sample %d ended its process: %s"
            logger.warning(said, self._config.path, sample.prompt.id, sample.index, error)

    def _ask(self, what: str, sample: Sample, calls: Sequence[Any], *arguments: Any) -> Any:
        """What the environment says of a sample; None, and the reason in `_failed`, if the machine or it failed.

        It is asked about these calls, or with these arguments.
        """
        row, seed = episode_of(sample.prompt, self._seed)
        # The number says which of the samples that may have begun alike. An engine that cannot repeat a sample bit for
        # bit may write another call after a stop: the tokens say which one it is.
        tokens = array("i", sample.prompt.token_ids).tobytes() + sample.token_ids.tobytes()
        which = f"{sample.number} {len(calls)} {hashlib.sha256(tokens).hexdigest()}"
        episode = (row, f"{seed}/{sample.index}", seed, calls)
        try:
            process = self._process_of(sample.number)
            return self._value(what, sample.prompt, sample.index, calls, which, arguments or episode, process)
        # Neither is the model's fault.
        except FAILURES as error:
            self._failed[sample.number] = f"environment: {error}"
            return None

    def _value(
        self,
        what: str,
        prompt: Prompt,
        index: int,
        calls: Sequence[Any],
        which: str,
        arguments: tuple[Any, ...],
        process: int,
    ) -> Any:
        """What the journal or the episode's process says.

        The limit is that of all calls, as they are made again where the episode's object is missing. Raises one of
        FAILURES.
        """
        key = f"{what} {prompt.id} {index} {which}"
        if self._journal and (recorded := self._journal.get(key)):
            return recorded[0]
        seconds = self._config.seconds * max(1, _number_of_calls(calls))
        late = min(LATE, seconds / 2)

        def slow() -> str:
            asked = f"problem {prompt.id}, sample {index}, turn {len(calls)}"
            waiting = self._workers.waiting(process)
            behind, said = f"; {waiting} more wait for its process" if waiting else "", what.removeprefix("agent_")
            return f"environment.path={self._config.path}: no {said} after {late:g} s, still waiting; {asked}{behind}"

        try:
            with announced(late, slow), beside("environment", what, problem=prompt.id, sample=index, turn=len(calls)):
                value = self._workers.answer(process, what, arguments, seconds)
        except OutOfCpu as error:
            # Otherwise it was a timer that the environment had set.
            if what != "reply" or self._cpu_seconds is None:
                raise
            if not self._undone:
                said = "environment.path=%s: a call of problem %s, sample %d was undone, others may follow: "
                said += "it used more than environment.cpu_seconds=%g; load at import what takes long; %s"
                logger.warning(said, self._config.path, prompt.id, index, self._cpu_seconds, error)
            self._undone += 1
            text = f"error: the call used more than {self._cpu_seconds:g} CPU seconds, and was undone"
            value = {"text": text, "error": True, "done": False, "reward": None, "undone": True}
        if self._journal:
            self._journal.put(key, value)
        return value

    def _to_their_ranks(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples that this rank holds once those with a new call, and finished ones that have made calls, are on
        the ranks of their episodes."""
        _, ranks = _rank_and_ranks()
        if ranks == 1:
            return [*samples]
        staying: list[Sample] = []
        moving: list[Sample] = []
        for sample in samples:
            moves = self._asks(sample) or (sample.calls and sample.finish_reason != SLICE)
            (moving if moves else staying).append(sample)
        received = to_each_rank(lambda: [[one for one in moving if one.number % ranks == to] for to in range(ranks)])
        return staying + [one for of_rank in received for one in of_rank]

    def _asks(self, sample: Sample) -> bool:
        called = self.is_agent or sample.token_ids[-1] == self.stop_id
        return sample.finish_reason == "stop" and called and not sample.prompt.unopened

    def _process_of(self, number: int) -> int:
        """The process that has the episode of sample `number`, which is on rank `number` modulo the number of ranks."""
        _, ranks = _rank_and_ranks()
        return number // ranks % self._config.at_once

    def _answered(self, sample: Sample, longest: int) -> Sample:
        """The sample with the reply to its last call; finished if that ends the episode, or leaves no room for more, or
        if SGLang's parser finds no call."""
        earlier = _made(sample)
        begin = sample.given[-1][1] if sample.given else 0
        # Without the token that ends the turn, and those that only the model has: it may have more than its tokenizer.
        own = [i for i in sample.token_ids[begin:-1] if i < self._tokenizer.vocab_size]
        turn = self._tokenizer.decode(own)
        if self._config.tool_call_parser is not None:
            call = self._ask("calls", sample, earlier, turn, self._config.close)
            if not call:
                return sample if call == "" else replace(sample, finish_reason="abort")
        else:
            call = last_calls(turn, self._config.open)
        texts = [*earlier, call]
        calls_so_far = _number_of_calls([*(call.text for call in sample.calls), call])
        if sample.sampled >= longest or calls_so_far > self._config.max_calls:
            return replace(sample, finish_reason="length")
        began = time.monotonic()
        reply = self._ask("reply", sample, texts)
        if reply is None:
            return replace(sample, finish_reason="abort")
        self._seconds.append(time.monotonic() - began)
        answered = Call(call, reply["error"], reply["reward"], reply.get("undone", False))
        text = encodable(reply["text"])
        # The limit is on the environment's own text: the tokens of the template do not count.
        ids, most = self._tokenizer.reply(text, "{reply}"), self._config.max_reply_tokens
        if len(ids) > most:
            head, tail = ids[: most // 2], ids[len(ids) - (most - most // 2) :]
            text = self._tokenizer.decode(head) + CUT + self._tokenizer.decode(tail)
        ids, calls = self._tokenizer.reply(text, self._template), (*sample.calls, answered)
        sample = replace(sample, calls=calls)
        return sample if reply["done"] else self._going_on(sample, ids)

    def _requested(self, sample: Sample, longest: int) -> Sample:
        """The sample with what its agent requests after its last turn; finished if that ends the episode, or leaves no
        room for more."""
        turns, began = turns_of(sample, self._tokenizer), time.monotonic()
        asked = self._ask("agent_reply", sample, turns, *self._played(sample), turns, sample.prompt.request)
        if sample.number in self._failed:
            return replace(sample, finish_reason="abort")
        self._seconds.append(time.monotonic() - began)
        call = Call(turns[-1]["text"], False, then=asked["digest"] if asked else "")
        sample = replace(sample, calls=(*sample.calls, call))
        if asked is None:
            return sample
        if sample.sampled >= longest or len(turns) > self._config.max_calls:
            return replace(sample, finish_reason="length")
        self._tell_ignored(asked)
        if asked["drifted"] and not self._drifted:
            self._drifted = True
            said = "environment.path=%s: an agent was started again with the same turns, and requested something else; "
            said += "of problem %s, sample %d; samples go on, and rewards are of the agent's new course"
            logger.warning(said, self._config.path, sample.prompt.id, sample.index)
        tokenizer = self._asking.get(sample.prompt.task, self._tokenizer)
        try:
            ids, anew = context_after(sample, asked, tokenizer, self._config.keep_thoughts)
        except InputError as error:
            self._failed[sample.number] = f"environment: {error}"
            return replace(sample, finish_reason="abort")
        return self._going_on(sample, ids, anew)

    def _going_on(self, sample: Sample, ids: Sequence[int], anew: bool = False) -> Sample:
        """The sample with these given tokens, with which its context may begin anew; finished if there is no room for
        more."""
        first, end = len(sample.token_ids), len(sample.token_ids) + len(ids)
        if len(sample.prompt.token_ids) + end >= self._context:
            return replace(sample, finish_reason="length")
        return replace(
            sample,
            token_ids=sample.token_ids + array("i", ids),
            logprobs=sample.logprobs + array("f", bytes(4 * len(ids))),
            finish_reason=TURN,
            given=(*sample.given, (first, end)),
            restarts=(*sample.restarts, first) if anew else sample.restarts,
        )

    def _tell_ignored(self, asked: Mapping[str, Any]) -> None:
        """Warns of the fields of a request that change nothing, once of each."""
        for name in sorted({*asked["ignored"]} - self._ignored):
            self._ignored.add(name)
            said = "environment.path=%s: requests have %s, which changes nothing: turns are sampled as the run says"
            logger.warning(said, self._config.path, name)

    def _played(self, sample: Sample) -> tuple[dict[str, Any], str]:
        """(fields of the problem, name of the episode), as the functions of agent.py take them."""
        row, seed = episode_of(sample.prompt, self._seed)
        return row, f"{seed}/{sample.index}"


def _template_of(config: EnvironmentConfig, tokenizer: Tokenizer, is_agent: bool) -> tuple[str, tuple[str, ...]]:
    """What is written around a reply, and a warning if the chat template drops thoughts, which are kept here; for an
    agent, whose messages have no template but that of chats, see `check_chat`.

    Raises:
        InputError: As `Tokenizer.reply_template`.
    """
    if is_agent:
        return "{reply}", check_chat(config, tokenizer)
    if "{reply}" in config.reply:
        return config.reply, ()
    template = tokenizer.reply_template(config.reply, config.close, config.keep_thoughts)
    if config.keep_thoughts:
        try:
            tokenizer.reply_template(config.reply, config.close, False)
        except InputError:
            return template, (THOUGHTS,)
    return template, ()


def _stop_id(config: EnvironmentConfig, tokenizer: Tokenizer, template: str) -> int:
    """The token that ends a call. What cannot be encoded is refused now, and not in the middle of a step."""
    where = f"environment.close={config.close!r}"
    try:
        stop_id = tokenizer.token_id(config.close)
        where = f"environment.reply={config.reply!r}"
        tokenizer.reply("", template)
    except InputError as error:
        what = error.what if repr(config.close) == error.where else f"{error.where}: {error.what}"
        raise InputError(where, what, error.fix) from None
    return stop_id


def _made(sample: Sample) -> list[str | None]:
    """Calls of each earlier turn of a sample; None for a turn that was undone."""
    return [None if call.undone else call.text for call in sample.calls]


def _number_of_calls(turns: Sequence[Any]) -> int:
    """Number of calls in these turns; each turn of an agent counts as one."""
    return sum(len(calls_in(turn)) if isinstance(turn, str) else 1 for turn in turns if turn is not None)


@contextmanager
def conversation_of(config: Config, tokenizer: Tokenizer) -> Iterator[Conversation | None]:
    """Context with a run's conversation; None if the run has no environment.

    Every rank of a job must call it.

    Raises:
        InputError: As in `Conversation`, on any rank; raised on all of them, so that none waits for another.
    """
    if config.environment.path is None:
        yield None
        return
    rewarded = any(term.built_in == "environment" for term in config.reward.terms)
    conversation: Conversation | None = None
    failure: Exception | None = None
    room, seed = config.model.context, config.run.seed
    try:
        asking = {name: tokenizer_of(source, config.data, tokenizer) for name, source in config.data.sources.items()}
        conversation = Conversation(config.environment, tokenizer, room, seed, rewarded, asking)
    except InputError as error:
        failure = error
    except Exception as error:
        failure = RuntimeError(f"environment.path={config.environment.path}: {type(error).__name__}: {error}")
    failures = _from_all_ranks(lambda: failure)
    with closing(conversation) if conversation else nullcontext():
        for each in filter(None, failures):
            raise each
        yield conversation


def _rank_and_ranks() -> tuple[int, int]:
    """This rank and the number of ranks; a dry run has no process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def encodable(text: str) -> str:
    """The text without lone surrogates, which JSON lets through and no tokenizer takes."""
    return text.encode(errors="replace").decode()


def _from_all_ranks(work: Callable[[], Result]) -> list[Result]:
    """What `work` gives on each rank; a dry run has no process group."""
    return from_all_ranks(work) if dist.is_initialized() else [work()]
