"""An environment tried on a few problems before a run, with made-up calls."""

from __future__ import annotations

import inspect
import json
from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, get_type_hints

from grpo_mega.config.from_folder import CHAT
from grpo_mega.config.schema import Config, EnvironmentConfig
from grpo_mega.data.tokenizer import Tokenizer
from grpo_mega.environment.agent_chat import begun
from grpo_mega.environment.calls import is_stepped, load, needed, parameters, schemas
from grpo_mega.environment.conversation import conversation_of
from grpo_mega.environment.episode import episode_of
from grpo_mega.environment.workers import environment_error, of_user
from grpo_mega.errors import InputError
from grpo_mega.reward.user_functions import IMPORT_SECONDS, Question, UserFunction, UserFunctions
from grpo_mega.rollout.engine import TURN
from grpo_mega.types import Prompt, Sample, Score

TRIED = 2
"""Number of problems that are tried."""
OPENED = 16
"""Number of problems whose beginnings are measured."""
TURN_OF_TRIAL = "I do not know."
"""The policy's turn with which an agent is tried."""
LONGEST = 10**7
"""Characters that the beginning of an episode may have before its context is known."""


def described(path: str) -> dict[str, Any]:
    """What `about` says of an environment, asked in a guarded process.

    Raises:
        InputError: It cannot be used; names the path.
    """
    functions = {"about": UserFunction(f"{__name__}:about", {"path": path})}
    with closing(UserFunctions(functions, seed=0, seconds=IMPORT_SECONDS)) as worker:
        try:
            return worker.value("about")
        except RuntimeError as error:
            raise environment_error(f"--environment {path}", path, error) from None


def about(path: str) -> dict[str, Any]:
    """Whether an environment gives "rewards", is "stepped" by the text of a call, or is an "agent", its "tools": {name:
    {"signature", "does", "needs"}}, and their "schemas", which are None for the reason "undescribed"."""
    kind, tools, described, why = load(path), {}, None, ""
    try:
        described = schemas(kind)
    except InputError as error:
        why = error.what
    for name, tool in kind.tools.items():
        hints = get_type_hints(tool)
        tools[name] = {
            "signature": str(inspect.signature(tool).replace(parameters=parameters(tool, kind))),
            "does": (inspect.getdoc(tool) or "").partition("\n")[0],
            "needs": {
                parameter.name: getattr(hints[parameter.name], "__name__", "str") for parameter in needed(tool, kind)
            },
        }
    is_agent = kind.agent is not None
    about = {"rewards": is_agent or hasattr(kind.make, "get_reward"), "stepped": is_stepped(kind), "agent": is_agent}
    return about | {"tools": tools, "schemas": described, "undescribed": why}


def longest_opening(path: str, prompts: Sequence[Prompt], tokenizer: Tokenizer) -> int:
    """Tokens that `reset`, or the first request of an agent, adds to one of the first `OPENED` problems, at most; 0
    where it fails, which `try_out` will report."""
    form = {"open": "", "close": "", "parser": None}
    options: dict[str, dict[str, Any]] = {
        "episode:check": {"parser": None},
        "episode:opening": {"longest": LONGEST},
        "agent:agent_opening": {"longest": LONGEST, "form": form, "patience": IMPORT_SECONDS},
    }
    functions = {
        name.partition(":")[2]: UserFunction(f"grpo_mega.environment.{name}", {"path": path, **own})
        for name, own in options.items()
    }
    added = [0]
    with closing(UserFunctions(functions, 0, IMPORT_SECONDS)) as worker:
        try:
            can = worker.value("check")
            for prompt in prompts[:OPENED]:
                row, seed = episode_of(prompt, 0)
                asked = ("agent_opening", (row,)) if can["agent"] else ("opening", (row, seed))
                question = Question(asked[0], asked[1], IMPORT_SECONDS)
                if can["async"]:
                    worker.serve(deque([question]))
                else:
                    question.answer.set_result(worker.value(question.name, *question.arguments))
                _, ids = begun(prompt, question.answer.result(), tokenizer, can["agent"])
                added.append(len(ids) - len(prompt.token_ids))
        except (RuntimeError, InputError):
            pass
    return max(added)


def try_out(
    config: Config, tokenizer: Tokenizer, prompts: Sequence[Prompt], tools: dict[str, Any], told_by: str
) -> None:
    """Prints the tools, and for a call of each in a few problems the reply and the reward.

    `told_by` says how the policy learns of the tools.

    Raises:
        InputError: The environment fails, or its settings do not fit the tokenizer.
    """
    if config.environment.tool_call_parser is not None:
        print(f"Calls are shown as JSON here; the run reads those of {config.environment.tool_call_parser}.")
        if find_spec("sglang") is None:
            print("warning: its parser is SGLang's, which is not installed here; the run needs it")
        print()
    settings = replace(config.environment, tool_call_parser=None)
    config = replace(config, environment=settings)
    if tools:
        print(f"{settings.path}: the policy can call these tools; {told_by}:\n")
    for name, tool in tools.items():
        print(f"  {name}{tool['signature']}{tool['does'] and '  ' + tool['does']}")
    rewards: list[float | None] = []

    def score(samples: Sequence[Sample]) -> list[Score]:
        rewards.extend(sample.reward for sample in samples)
        return [Score(0.0, {}) for _ in samples]

    with conversation_of(config, tokenizer) as conversation:
        assert conversation
        for warning in conversation.warnings:
            print(f"\nwarning: {warning}")
        where = f"environment.path={settings.path}"
        again = conversation.opened(prompts[:TRIED])
        for number, prompt in enumerate(conversation.opened(prompts[:TRIED])):
            _show_beginning(prompt, again[number], where, conversation.is_agent)
            if number == 0 and config.data.template == CHAT and (untold := conversation.untold(prompt)):
                print(f"\nwarning: {untold}")
            print(f"\nmade-up {'turn' if conversation.is_agent else 'calls'} for {prompt.id}, and what follows:")
            calls = [_call(tool, settings, prompt) for tool in tools.items()]
            for index, turn in enumerate([TURN_OF_TRIAL] if conversation.is_agent else calls):
                ids = array("i", [*tokenizer.encode(turn), conversation.stop_id])
                logprobs = array("f", bytes(4 * len(ids)))
                made = Sample(prompt, index, ids, logprobs, "stop", ((0, 0),), turn, number=number)
                (after,) = conversation.go_on([made], longest=len(ids) + 1)
                (scored,) = conversation.scores(score, [after])
                if scored.unscorable:
                    raise of_user(where, f"{turn} of {prompt.id}: ", scored.unscorable, "correct the environment")
                ended = "model.context has no room for the reply" if after.finish_reason == "length" else "it is done"
                goes_on = after.finish_reason == TURN
                reply = tokenizer.decode(after.token_ids[len(ids) :]) if goes_on else f"\nthe sample ends: {ended}"
                print(f"\n{turn}{settings.close}{reply}")
                if (reward := rewards[-1]) is not None:
                    print(f"reward: {reward:g}")
    print()


def _show_beginning(prompt: Prompt, again: Prompt, where: str, is_agent: bool) -> None:
    """Prints with what an episode begins, and a warning if it began in another way `again`.

    Raises:
        InputError: It did not begin.
    """
    if prompt.unopened:
        what = "the agent's first request for" if is_agent else "reset of"
        raise of_user(where, f"{what} problem {prompt.id}: ", prompt.unopened, "correct the environment")
    if is_agent:
        print(f"\nthe agent's first request for {prompt.id}, {len(prompt.token_ids)} tokens:\n{prompt.text}")
    elif prompt.opening:
        print(f"\nreset adds to {prompt.id}, {len(prompt.token_ids)} tokens with it: {prompt.opening}")
    if prompt.request != again.request:
        print("warning: its first request was another one the second time, but all samples of a problem begin")
        print("alike: make it depend on the problem alone, not on a clock, a path or chance")
    if prompt.opening != again.opening:
        print("warning: reset returned another text the second time, but it is called again for each sample;")
        print("draw from `random` or `numpy.random`, which are seeded alike for all samples of a problem")


def _call(tool: tuple[str, dict[str, Any]], settings: EnvironmentConfig, prompt: Prompt) -> str:
    """A made-up call of a tool, (its name, what `about` says of it)."""
    name, about_it = tool
    arguments = {argument: _made_up(kind, prompt) for argument, kind in about_it["needs"].items()}
    return settings.open + json.dumps({"name": name, "arguments": arguments})


def _made_up(kind: str, prompt: Prompt) -> Any:
    """An argument of a type: the problem's answer, if it can be one."""
    try:
        return {"int": int, "float": float, "str": str}[kind](prompt.answer)
    except (KeyError, ValueError):
        return {"int": 1, "float": 1.0, "bool": True, "list": [], "dict": {}}.get(kind, "text")
