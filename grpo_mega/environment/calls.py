"""Tools: the public methods of a user's class, or plain functions, and a model's calls of them.

No import of ours is needed in users' files: a class has `reset(**row)`, public methods that are its tools, and perhaps
`get_reward()` and `close()`. TRL's `environment_factory` takes the same classes, and its `tools` the same functions. A
function with a parameter `base_url` is no tool but an agent, see agent.py.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from grpo_mega.environment.stepped import Stepped, adapted
from grpo_mega.errors import InputError, meant

RESERVED = ("reset", "get_reward", "close")
"""Public methods that the model cannot call, and names that functions cannot have."""
AGENT, KEY = "base_url", "api_key"
"""The parameter that makes a function an agent, and a further one that it may have."""
VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
"""Kinds of parameters that take any number of arguments, also none."""
READS: dict[type, Callable[[str], Any]] = {str: str, int: int, float: float}
"""Type of an argument -> how to read it from bare text."""

JSON_CALL = '{"name": ..., "arguments": {...}}'
"""A call as Hermes and Qwen write it."""
CALLS = "<｜tool▁calls▁begin｜>"
"""What stands before the first call of a turn, as DeepSeek's models write it."""
END_OF_CALL = "<｜tool▁call▁end｜>"
"""What ends each of several calls of a turn, as DeepSeek's models write them."""
FORMS = {
    "<｜tool▁call▁begin｜>": {"open": "<｜tool▁call▁begin｜>", "close": "<｜tool▁calls▁end｜>"},
    r"<tool_call>\n<function=": {"tool_call_parser": "qwen3_coder", "close": "<|im_end|>"},
    "<arg_key>": {"tool_call_parser": "glm45", "close": "<|observation|>"},
    "<|tool_call_argument_begin|>": {"tool_call_parser": "kimi_k2", "close": "<|im_end|>"},
    "<|start_header_id|>ipython": {
        "tool_call_parser": "llama3",
        "close": "<|eot_id|>",
        # Its template encodes replies as JSON, so `reply: tool` is refused.
        "reply": '<|start_header_id|>ipython<|end_header_id|>\n\n"{reply}"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    },
    "<|channel|>commentary": {
        "tool_call_parser": "gpt-oss",
        "close": "<|call|>",
        # Its template refuses a reply without the call before as data.
        "reply": '<|start|>functions.{tool} to=assistant<|channel|>commentary<|message|>"{reply}"<|end|>'
        "<|start|>assistant",
    },
}
"""What the source of a family's chat template has for calls, or their replies -> the settings `environment.*` that read
its calls; {tool} stands for the only tool. Hermes' form, which Qwen2.5 and Qwen3 write, is the default."""
_NAMED = re.compile(r"\s*(?:function<｜tool▁sep｜>)?([\w.-]+)\s*(?:<｜tool▁sep｜>|```json)")
"""The name of a call, before JSON arguments, as DeepSeek's models write it: V3 and R1 with a fence, V3.1 without."""


class BadCall(ValueError):
    """Error: the model's call names no tool, or its arguments do not fit; the model reads the message."""


@dataclass(frozen=True)
class Kind:
    """An environment that a path names.

    Attributes:
        make: Makes the object of an episode; None for functions, which have no state.
        tools: Name -> function, whose first parameter is the episode's object if there is one.
        agent: The function that plays an episode by requests to an endpoint; None for tools.
    """

    make: Callable[[], Any] | None
    tools: dict[str, Callable[..., Any]]
    agent: Callable[..., Any] | None = None

    @property
    def is_async(self) -> bool:
        """Whether a process makes its calls at once: it is an agent, or something of it is declared as `async def`."""
        if self.agent:
            return True
        own = [getattr(self.make, name, None) for name in RESERVED] if self.make else []
        # A decorator may be an ordinary function.
        return any(inspect.iscoroutinefunction(inspect.unwrap(one)) for one in (*self.tools.values(), *own) if one)


def is_stepped(kind: Kind) -> bool:
    """Whether the whole text of a call is what to do: the class is of another library."""
    return inspect.isclass(kind.make) and issubclass(kind.make, Stepped)


def load(path: str) -> Kind:
    """The environment `module:Class`, or `module:function,module:function`.

    Raises:
        InputError: The path names nothing usable; says what is missing.
        Exception: Whatever the module raises when it is imported.
    """
    found = []
    for part in map(str.strip, path.split(",")):
        module, _, name = part.partition(":")
        if not module or not name:
            raise InputError(f"environment.path={part}", "not a path", "write it as module:Class or module:function")
        imported = importlib.import_module(module)
        named = getattr(imported, name, None)
        if not callable(named):
            what = f"{module} has no class or function {name}"
            close = meant(name, [known for known, value in vars(imported).items() if callable(value)])
            raise InputError(f"environment.path={part}", what, f"correct the name{close}")
        found.append(named)
    classes = [one for one in found if inspect.isclass(one)]
    if classes and len(found) > 1:
        raise InputError(f"environment.path={path}", "a class beside others", "name one class, or functions only")
    if agents := [one for one in found if not inspect.isclass(one) and AGENT in _parameters(one)]:
        return Kind(None, {}, _agent(path, found, agents[0]))
    if not classes:
        tools = {function.__name__: function for function in found}
        for name in RESERVED:
            if name in tools:
                what = f"{name} is reserved and cannot name a tool"
                raise InputError(f"environment.path={path}", what, f"rename `def {name}`")
        _check(path, tools, skip=0)
        return Kind(None, tools)
    made = adapted(classes[0], path) or classes[0]
    methods = inspect.getmembers(made, inspect.isfunction)
    tools = {name: method for name, method in methods if not name.startswith("_") and name not in RESERVED}
    if not callable(getattr(made, "reset", None)):
        raise InputError(f"environment.path={path}", "has no method reset", "write `def reset(self, **row)`")
    for name in dir(made):
        bound = {staticmethod: "static", classmethod: "class"}.get(type(inspect.getattr_static(made, name)))
        if bound and not name.startswith("_") and name not in RESERVED:
            fix = f"write `def {name}(self, ...)` without the decorator, or begin its name with _"
            raise InputError(f"environment.path={path}", f"{name} is a {bound} method", fix)
    _check(path, tools, skip=1)
    return Kind(made, tools)


def _agent(path: str, found: Sequence[Callable[..., Any]], agent: Callable[..., Any]) -> Callable[..., Any]:
    """The agent that a path names, if it can be one; raises InputError otherwise."""
    where = f"environment.path={path}"
    if len(found) > 1:
        raise InputError(where, "an agent beside others", "name one agent, or tools only")
    if inspect.isgeneratorfunction(agent) or inspect.isasyncgenfunction(agent):
        raise InputError(where, "an agent that is a generator", "return the reward, and leave out yield")
    for parameter in inspect.signature(agent).parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise InputError(where, f"{parameter.name} of the agent cannot be named", "leave out the / after it")
    return agent


def _parameters(function: Callable[..., Any]) -> Sequence[str]:
    # Functions of extension modules may have no signature.
    with suppress(TypeError, ValueError):
        return [*inspect.signature(function).parameters]
    return ()


def _check(path: str, tools: Mapping[str, Callable[..., Any]], skip: int) -> None:
    """Refuses an environment without tools, or with tools that cannot be called or do not say what their parameters
    are."""
    if not tools:
        what = "has no tools: no public methods besides reset, get_reward and close"
        raise InputError(f"environment.path={path}", what, "write a method that the model can call")
    for name, tool in tools.items():
        try:
            get_type_hints(tool)
        except NameError as error:
            raise InputError(f"environment.path={path}", f"a type of {name}: {error}", "import it") from None
        for parameter in [*inspect.signature(tool).parameters.values()][skip:]:
            if parameter.annotation is parameter.empty:
                what = f"the parameter {parameter.name} of {name} has no type"
                fix = f"write it as {parameter.name}: str, or another type"
                raise InputError(f"environment.path={path}", what, fix)


def schemas(kind: Kind) -> list[dict[str, Any]]:
    """The tools as chat templates read them (JSON schema of OpenAI's `tools`), from type hints and docstrings.

    Raises:
        InputError: A docstring does not describe its tool, or one of its parameters.
    """
    # Imported here because it takes seconds, and answering calls does not need it.
    from transformers.utils import get_json_schema

    # The signature of a bound method leaves `self` out. Binding needs an object, which is never initialised.
    try:
        bound = kind.make.__new__(kind.make) if inspect.isclass(kind.make) else None
        return [get_json_schema(tool if bound is None else getattr(bound, name)) for name, tool in kind.tools.items()]
    # Its two exceptions share no base class.
    except Exception as error:
        raise InputError("environment.path", str(error), "describe tool and parameters in its docstring") from None


def form_of(template: str, tools: Sequence[str] = ()) -> dict[str, str]:
    """Settings `environment.*` that read the calls which a chat template writes; {} for their defaults.

    If the family's replies name the tool, `reply` is set only for a single tool.
    """
    form = next((settings for mark, settings in FORMS.items() if mark in template), {})
    if "{tool}" not in form.get("reply", ""):
        return form
    others = {name: value for name, value in form.items() if name != "reply"}
    return others | {"reply": form["reply"].replace("{tool}", tools[0])} if len(tools) == 1 else others


def last_calls(turn: str, opened: str) -> str:
    """Content of the call that ends a turn: what follows the last `opened`, with the calls right before it."""
    parts = turn.split(opened) if opened else [turn]
    first = len(parts) - 1
    while first > 1 and parts[first - 1].rstrip().endswith(END_OF_CALL):
        first -= 1
    return "".join(parts[first:])


def calls_in(content: str) -> list[str]:
    """The calls of a turn: one, or several as DeepSeek's models write them, or as a JSON list."""
    if _NAMED.match(content):
        return [part for part in content.split(END_OF_CALL) if part.strip()]
    several = _json(content)
    call = {"name", "arguments"}
    if isinstance(several, list) and several and all(isinstance(one, dict) and one.keys() == call for one in several):
        return [json.dumps(one) for one in several]
    return [content]


def calls_of_sglang(turn: str, close: str, parser: str, described: Sequence[Mapping[str, Any]]) -> str:
    """The calls of a turn, which `close` has ended, as SGLang's tool-call parser of this name finds them.

    Args:
        turn: The turn, without `close`.
        close: The token that ended it.
        parser: Name of the parser.
        described: The tools, as `schemas` describes them.

    Returns:
        A JSON list, which `calls_in` takes, or "" if the turn has no call after its thoughts. If it has some, and none
        can be read, the list is that of a call without a name.

    Raises:
        InputError: SGLang cannot be used or has no such parser.
    """
    # By default it drops calls of unknown tools, which the model should read about.
    os.environ["SGLANG_FORWARD_UNKNOWN_TOOLS"] = "1"
    where = f"environment.tool_call_parser={parser}"
    try:
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
    # A package that does not fit SGLang may raise anything.
    except Exception as error:
        raise InputError(where, f"SGLang cannot be imported: {error}", "install it, or set null") from None
    tools = [Tool(**schema) for schema in described]
    try:
        is_call = FunctionCallParser(tools, parser).has_tool_call
    except Exception:
        names = ", ".join(sorted(FunctionCallParser.ToolCallParserEnum))
        raise InputError(where, "SGLang has no such parser", f"choose one of {names}") from None
    thoughts, end, said = turn.partition("</think>")
    if not end:
        said = "" if "<think>" in thoughts else thoughts
    # Some parsers look only at the first character.
    said = said.strip()
    if parser == "gpt-oss":
        # It looks for the header, with which the prompt ends.
        said = "<|start|>assistant" + said
    # For some the end is part of the call, and for others it would become a part of the last argument.
    found: list[Any] = []
    for text in (said, said + close):
        # Some of the parsers trust the model more than others.
        with suppress(Exception):
            found = found or (FunctionCallParser(tools, parser).parse_non_stream(text)[1] if is_call(text) else [])
    if not found and not is_call(said) and "call" not in close:
        return ""
    calls = [{"name": call.name or "", "arguments": _json(call.parameters)} for call in found]
    return json.dumps(calls or [{"name": "", "arguments": {}}])


def read_calls(turn: str, opened: str) -> tuple[str, list[dict[str, Any]]]:
    """The text of a turn before its calls, each after `opened`, and the calls: {"name", "arguments"}; the whole turn,
    and no calls, if one of them is not JSON with a name and arguments, as Hermes, Qwen and DeepSeek write it."""
    said, *parts = turn.split(opened) if opened else [turn]
    calls = []
    for part in parts:
        named = _NAMED.match(part)
        try:
            found, _ = json.JSONDecoder().raw_decode(part[named.end() :].lstrip() if named else part.lstrip())
        except (ValueError, RecursionError):
            return turn, []
        call = {"name": named[1], "arguments": found} if named else found
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return turn, []
        calls.append({"name": call["name"], "arguments": call.get("arguments", {})})
    return said.removesuffix(CALLS), calls


def read_call(content: str, kind: Kind) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call.

    JSON {"name": ..., "arguments": {...}} as Hermes and Qwen write it, a name and JSON arguments as DeepSeek does, or
    bare text for a single tool that needs just one argument.

    Raises:
        BadCall: It is none of these, or names no tool, or its arguments do not fit the tool's parameters.
    """
    name, arguments = _parsed(content, kind)
    tool = kind.tools.get(name)
    if tool is None:
        what = f"no tool {name!r}" if name else "the call cannot be read"
        raise BadCall(f"{what}; the tools are {', '.join(kind.tools)}")
    signature = inspect.signature(tool)
    try:
        signature.replace(parameters=parameters(tool, kind)).bind(**arguments)
    except TypeError as error:
        raise BadCall(f"{name}: {error}") from None
    hints = get_type_hints(tool)
    for argument, value in arguments.items():
        if not _fits(value, hints.get(argument, Any)):
            wanted = inspect.formatannotation(hints[argument])
            raise BadCall(f"{name}: {argument} must be {wanted}, and is {json.dumps(value)[:80]}")
    return name, arguments


def parameters(tool: Callable[..., Any], kind: Kind) -> list[inspect.Parameter]:
    """Parameters of a tool that a call gives: all but `self`."""
    return [*inspect.signature(tool).parameters.values()][1 if kind.make else 0 :]


def needed(tool: Callable[..., Any], kind: Kind) -> list[inspect.Parameter]:
    """Parameters that every call must give."""
    return [one for one in parameters(tool, kind) if one.default is one.empty and one.kind not in VARIABLE]


def argument_alone(kind: Kind) -> str | None:
    """The argument that may stand as bare text for a call, that of a single tool; None if a call needs its name."""
    tool, *others = kind.tools.values()
    asked = needed(tool, kind) or parameters(tool, kind)[:1]
    alone = not others and len(asked) == 1 and asked[0].kind not in (*VARIABLE, inspect.Parameter.POSITIONAL_ONLY)
    return asked[0].name if alone else None


def _parsed(content: str, kind: Kind) -> tuple[str, dict[str, Any]]:
    if named := _NAMED.match(content):
        name, arguments = named[1], _json(content[named.end() :].strip().removesuffix("```"))
    elif isinstance(call := _json(content), dict) and isinstance(call.get("name"), str):
        name, arguments = call["name"], call.get("arguments", {})
    else:
        return _bare(content, kind)
    if not isinstance(arguments, dict):
        raise BadCall("the arguments are not a JSON object")
    return name, arguments


def _bare(content: str, kind: Kind) -> tuple[str, dict[str, Any]]:
    """The call of a single tool, from its argument as text."""
    argument = argument_alone(kind)
    if argument is None:
        raise BadCall(f"not a call: write {JSON_CALL}")
    ((name, tool),) = kind.tools.items()
    read = READS.get(get_type_hints(tool).get(argument, str), json.loads)
    try:
        return name, {argument: read(content.strip())}
    except (ValueError, RecursionError):
        raise BadCall(f"{name}: {argument} cannot be {content.strip()[:80]!r}") from None


def _json(text: str) -> Any:
    """The value of a JSON text; None if it is not one."""
    try:
        return json.loads(text)
    # Python's parser recurses, so deep nesting ends it too.
    except (ValueError, RecursionError):
        return None


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value is of the type that a parameter asks for. Types that JSON does not have take any value."""
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if hint is None or hint is type(None):
        return value is None
    plain = get_origin(hint) or hint
    if plain is list:
        return isinstance(value, list) and all(_fits(one, each) for each in get_args(hint) for one in value)
    if plain in (int, float):
        return isinstance(value, (int, plain)) and not isinstance(value, bool)
    return isinstance(value, plain) if plain in (str, bool, dict) else True
