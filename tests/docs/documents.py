"""Reads documents: fenced blocks, the commands among them, and text that is set as code.

A block fenced as `bash` is a list of commands that tests run, unless a comment in the line above gives a reason,
`<!-- not run: REASON -->`. Other blocks are not run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ranks import REPOSITORY

DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
"""The documents whose commands are run."""
CHECKED = [*DOCUMENTS, REPOSITORY / "CONTRIBUTING.md"]
"""The documents whose file names and settings have to exist."""

MAKEFILE = REPOSITORY / "Makefile"
RUNNABLE = "bash"
PROGRAMS = r"(?:\w+=\S*\s+)*(?:\S*/)?(?:python[\d.]*|torchrun|make|pytest|pip|srun|sbatch|\S+\.(?:sh|py))\s"
"""The beginning of a line that is a command."""


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    file: str
    line: int
    language: str
    not_run: str
    """Why tests do not run it; empty when they do."""
    text: str


@dataclass(frozen=True)
class Command:
    """One logical line of a `bash` block: continuation lines are joined, a comment at its end is gone."""

    file: str
    line: int
    text: str
    not_run: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def blocks(path: Path) -> list[Block]:
    """The fenced blocks of a document, in order.

    Raises:
        ValueError: A fence is not closed.
    """
    fenced: list[Block] = []
    lines = path.read_text().splitlines()
    opened: int | None = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if opened is None:
            opened = number
            continue
        reason = re.fullmatch(r"<!-- not run: (.+) -->", lines[opened - 1]) if opened else None
        body = "\n".join(lines[opened + 1 : number])
        name = str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else path.name
        fenced.append(Block(name, opened + 2, lines[opened].strip("` "), reason[1] if reason else "", body))
        opened = None
    if opened is not None:
        raise ValueError(f"{path}:{opened + 1}: this fence is not closed")
    return fenced


def commands(path: Path) -> list[Command]:
    """The commands of a document, in order."""
    return [command for block in blocks(path) if block.language == RUNNABLE for command in _of_block(block)]


def programs(text: str) -> set[str]:
    """This project's programs that a command starts, also through a target of make: scripts, and modules after -m."""
    found = {*re.findall(r"(?:tools|slurm|tests)/[\w/]+\.(?:py|sh)\b", text)}
    found |= {*re.findall(r"-m (grpo_mega[\w.]*)", text)}
    for target in re.findall(r"^(?:\w+=\S* )*make (\S+)", text):
        rule = re.search(rf"^{re.escape(target)}:.*\n((?:\t.*\n)*)", MAKEFILE.read_text(), re.MULTILINE)
        found |= programs(rule[1]) if rule else set()
    return found


def _of_block(block: Block) -> list[Command]:
    parsed: list[Command] = []
    lines = block.text.split("\n")
    number = 0
    while number < len(lines):
        first, text = number, lines[number]
        if here := re.search(r"<<'(\w+)'", text):
            while lines[number] != here[1]:
                number += 1
            text = "\n".join(lines[first : number + 1])
        else:
            while text.endswith("\\") or text.count('"') % 2:
                number += 1
                text = f"{text.removesuffix(chr(92)).rstrip()} {lines[number].strip()}"
            text = re.sub(r"\s+#\s.*$", "", text).strip()
        if text:
            parsed.append(Command(block.file, block.line + first, text, block.not_run))
        number += 1
    return parsed


def text_without_blocks(path: Path) -> list[tuple[int, str]]:
    """(line number, line) of every line outside fenced blocks."""
    kept: list[tuple[int, str]] = []
    fenced = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced:
            kept.append((number, line))
    return kept


def code(path: Path) -> list[tuple[int, str]]:
    """(line number, text) of every span of inline code, and of every line of a block that is not Python."""
    spans = [(number, span) for number, line in text_without_blocks(path) for span in re.findall(r"`([^`]+)`", line)]
    fenced = [
        (block.line + offset, line)
        for block in blocks(path)
        if block.language != "python"
        for offset, line in enumerate(block.text.split("\n"))
    ]
    indented = [(number, line[4:]) for number, line in text_without_blocks(path) if line.startswith("    ")]
    return sorted(spans + fenced + indented)
