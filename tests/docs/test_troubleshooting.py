"""docs/troubleshooting.md quotes messages that the program prints: each stands in its source, as it stands there."""

from __future__ import annotations

import ast
import re
from functools import cache

from documents import text_without_blocks
from ranks import REPOSITORY

from grpo_mega.observe.alarms import ALARMS

PAGE = REPOSITORY / "docs" / "troubleshooting.md"
QUOTED = re.compile(r"`([^`]* [^`]*)`")
"""Code with a space in it is a message; a name has none."""


@cache
def said() -> str:
    """All text of the source, a string a line; `...` stands for what is put into it, a space for white space."""
    files = [*(REPOSITORY / "grpo_mega").rglob("*.py"), *(REPOSITORY / "tools").glob("*.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    return "\n".join(filter(None, map(text_of, nodes)))


def text_of(node: ast.AST) -> str:
    """The text of a string or an f-string; empty for other nodes."""
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
        return " ".join("".join(map(str, parts)).split())
    return " ".join(node.value.split()) if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def symptoms() -> list[str]:
    """The first cell of every row of a table."""
    rows = [line.split(" | ")[0].removeprefix("| ") for _, line in text_without_blocks(PAGE) if line.startswith("| ")]
    return [row for row in rows if row not in ("you see", "code", "---")]


def test_the_messages_are_the_programs_own() -> None:
    messages = [message for row in symptoms() for message in QUOTED.findall(row)]
    assert len(messages) > 20
    unknown = [message for message in messages if not all(piece in said() for piece in pieces(message))]
    assert not unknown, f"nothing prints these any more: {unknown}"


def pieces(message: str) -> list[str]:
    """What is compared: the stretches between `...` that say something; several values may stand for one."""
    return [piece for piece in message.split("...") if len(piece.strip()) > 3]


def test_every_alarm_that_is_named_exists() -> None:
    named = set(re.findall(r"alarm `(\w+)`", PAGE.read_text()))
    assert len(named) > 6
    assert named <= {alarm.name for alarm in ALARMS}
