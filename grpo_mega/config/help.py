"""The text of `--help`: every setting with its docstring, default and values, from the schema itself.

Only the schema is imported, so that it is printed at once.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf

from grpo_mega.config.limits import limits_of
from grpo_mega.config.load import config_dir, groups
from grpo_mega.config.schema import Config

INTRODUCTION = """\
Trains a policy with GRPO. Settings are words: GROUP=OPTION takes a file of configs/GROUP/, FIELD=VALUE sets one field.

    torchrun --standalone --nproc-per-node 2 -m grpo_mega.train experiment=tiny run.name=mine run.steps=20
    python -m grpo_mega.train experiment=tiny layout=single optimizer.lr=1e-4 --cfg job   prints the configuration only
    python -m grpo_mega.train experiment=tiny --dry-run                                   says all that is wrong with it
    python -m grpo_mega.train --help rollout                                              one group, all its fields

Lists and text with special characters are quoted twice, because the shell removes one pair of quotes:

    "rollout.stop=['<|im_end|>']"     'reward.terms=[{name: mine, weight: 1.0, function: my_rewards:mine}]'

FIELD=null means none. New entries are added with a plus: +rollout.sglang.arguments.schedule_policy=lpm

Groups, and the option that is used unless the experiment or the command line chooses another:
"""
WIDTH = 110


def answer(words: list[str]) -> None:
    """Prints the help and ends the process when the command line has -h or --help."""
    if not {"-h", "--help"} & {*words}:
        return
    rooms = [word for word in words if word in {field.name for field in fields(Config)}]
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` closes the pipe early
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(help_text(rooms)))
    sys.exit(0)


def help_text(rooms: list[str]) -> Iterator[str]:
    """The lines of the help: the groups and all fields, or only the fields of `rooms`."""
    if not rooms:
        yield INTRODUCTION
        defaults = _defaults()
        for group, options in groups().items():
            taken = f"[{defaults.get(group) or 'none'}]"
            yield from textwrap.wrap(
                f"{group:<12} {taken:<16} {' '.join(options)}", WIDTH, initial_indent="  ", subsequent_indent=" " * 32
            )
    hints = get_type_hints(Config)
    for room in rooms or [field.name for field in fields(Config)]:
        yield from _of_class(hints[room], f"{room}.")


def _defaults() -> dict[str, str | None]:
    """{group: default option}, from configs/config.yaml."""
    config: Any = OmegaConf.to_container(OmegaConf.load(config_dir() / "config.yaml"))
    return {group: option for entry in config["defaults"] if isinstance(entry, dict) for group, option in entry.items()}


def _of_class(owner: Any, prefix: str) -> Iterator[str]:
    """The lines for a dataclass of the schema: its own fields, then those of the dataclasses in it."""
    docstrings, hints = _docstrings(owner), get_type_hints(owner)
    yield f"\n{prefix.rstrip('.')}: {' '.join((owner.__doc__ or '').split())}"
    inner = [field for field in fields(owner) if is_dataclass(hints[field.name])]
    for field in fields(owner):
        if field not in inner:
            yield f"  {prefix}{field.name}{_default(field)}{_allowed(prefix + field.name)}"
            yield textwrap.fill(docstrings[field.name], WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
        for item in get_args(hints[field.name]):
            if is_dataclass(item):  # a list of them, or a mapping to them
                entry = "NAME" if get_origin(hints[field.name]) is dict else "0"
                yield from _of_class(item, f"{prefix}{field.name}.{entry}.")
    for field in inner:
        yield from _of_class(hints[field.name], f"{prefix}{field.name}.")


def _docstrings(owner: type) -> dict[str, str]:
    """{field: the docstring under it}."""
    (tree,) = ast.parse(inspect.getsource(owner)).body
    assert isinstance(tree, ast.ClassDef)
    return {
        before.target.id: " ".join(after.value.value.split())
        for before, after in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
    }


def _default(field: Field[Any]) -> str:
    """The default value of a field, in the command line's notation."""
    value = field.default if field.default_factory is NO_DEFAULT else field.default_factory()
    if value == "???":  # omegaconf.MISSING
        return ", must be given"
    return f"={value}" if isinstance(value, str) else f"={json.dumps(value, ensure_ascii=False)}"


def _allowed(name: str) -> str:
    """The interval or the choices of a field, or an empty text."""
    limit = limits_of(Config).get(name)
    return f"  {limit}" if limit else ""
