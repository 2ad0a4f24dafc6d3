"""Command lines as people type them: ~ is home, `run.name=1.10` is text, `reward=module:function` is a reward."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from types import UnionType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from grpo_mega.config.schema import Config
from grpo_mega.config.schema.layout import DECIDED

_LATEX = {
    "n": "nabla natural nearrow ne neg neq newline newcommand nexists ngeq ni nleq nmid noindent nolimits nonumber "
    "norm not notag notin nsubseteq nu nwarrow",
    "t": "tag tan tanh tau tbinom tfrac therefore theta thinspace tilde times tiny to top tr triangle",
}
"""First letter -> commands that begin with it, besides those of `\\text`."""
# A typed `\n` is a line break, except after another backslash and where the letters after it complete a LaTeX command,
# as in \neq; `\t` likewise.
_ESCAPE = re.compile(
    rf"(?<!\\)\\(?:(n)(?!(?:{'|'.join(word[1:] for word in _LATEX['n'].split())})(?![A-Za-z]))"
    rf"|(t)(?!(?:ext[a-z]*|{'|'.join(word[1:] for word in _LATEX['t'].split())})(?![A-Za-z])))"
)
_FUNCTION = re.compile(r"\w+(\.\w+)*:\w+")
_HOME = re.compile(r"(?<=[=\[,])~(?=/|$|[\],])")


class Renamed(argparse.Action):
    """The old name of an option, which is refused with the new one, its `const`."""

    def __init__(self, option_strings: Sequence[str], dest: str, const: str) -> None:
        """Takes a value or none, and is not in the help."""
        super().__init__(
            option_strings, dest, nargs="?", const=const, default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        """Ends the program, as any wrong option does."""
        parser.error(f"{self.option_strings[0]} is now {self.const}")


def with_escapes(text: str | None) -> str | None:
    r"""The text with `\n` and `\t`, which shells and YAML leave escaped, as line feed and tab; LaTeX commands stay."""
    return text and _ESCAPE.sub(lambda match: "\n" if match[1] else "\t", text)


def at_home(value: Any) -> Any:
    """A value, or a tree of values, with ~ at the start of paths replaced by the user's home."""
    if isinstance(value, dict):
        return {key: at_home(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [at_home(inner) for inner in value]
    return os.path.expanduser(value) if isinstance(value, str) and (value == "~" or value[:2] == "~/") else value


def literal(value: Any) -> Any:
    """A value, or a tree of values, escaped so that OmegaConf reads every `${` as text."""
    if isinstance(value, dict):
        return {key: literal(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [literal(inner) for inner in value]
    # OmegaConf reads an escaped `\${` as text and halves the backslashes before it, so they are doubled.
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def as_meant(words: Sequence[str]) -> list[str]:
    """The words of a command line in hydra's grammar, which has no ~ and reads 1.10 as a number even for text.

    A shell expands ~ only at the beginning of a word, not in settings or options such as --model=~/mine.
    `reward=module:function` becomes the reward whose only term is that function.
    """
    return [meant for word in words for meant in _as_meant(word)]


def with_chosen_sizes(words: Sequence[str]) -> list[str]:
    """The words, with layout.auto=false added if one of them sets a size of the layout, even to its default."""
    sizes = [word for word in words if re.fullmatch(rf"\+*layout\.({'|'.join(DECIDED)})=.*", word, re.DOTALL)]
    said = any(re.match(r"\+*layout\.auto=", word) for word in words)
    if said or not sizes:
        return [*words]
    # Beside the size rather than at the end, because argparse refuses positional words after options.
    at = words.index(sizes[0])
    return [*words[:at], "layout.auto=false", *words[at:]]


def _as_meant(word: str) -> list[str]:
    name, equals, value = word.partition("=")
    if not equals:
        return [word]
    if name == "reward" and _FUNCTION.fullmatch(value):
        term = value.rpartition(":")[2]
        return [f"reward.terms=[{{name: {term}, weight: 1.0, function: '{value}'}}]", f"reward.success={term}"]
    # What is in quotes is meant literally.
    if "'" not in word and '"' not in word:
        name, equals, value = _HOME.sub(lambda _: os.path.expanduser("~"), word).partition("=")
    if name[:1] != "-" and _is_text(name.lstrip("+")):
        try:
            read = OverridesParser.create().parse_override(f"{name}={value}").value()
        # An unreadable word is reported when it is composed.
        except HydraException:
            return [word]
        # Quoted, because hydra makes a number of 1.10 before the schema turns it back into text, which would be 1.1.
        value = f"'{value}'" if isinstance(read, (bool, int, float)) else value
    return [name + equals + value]


def _is_text(name: str) -> bool:
    """Whether the schema has a field of this dotted name whose values are text."""
    node: Any = Config
    for part in name.split("."):
        if get_origin(node) is dict:
            node = get_args(node)[1]
        else:
            node = get_type_hints(node).get(part) if isinstance(node, type) else None
    return node is str or (get_origin(node) is UnionType and set(get_args(node)) == {str, type(None)})
