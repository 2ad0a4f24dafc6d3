"""What the code of a test names: its own strings and modules, and those of what it takes from other files of tests/."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ranks import REPOSITORY

TOOLS = {path.name for path in (REPOSITORY / "tools").glob("*.py")}
HELPERS = {path.stem: path for path in (REPOSITORY / "tests").rglob("*.py") if path.name not in {*TOOLS, "conftest.py"}}
"""{module: file} of what tests import; each name is there once."""


def starts(place: Path, program: str) -> bool:
    """Whether a file or folder of tests names a program, such as tools/plan.py or grpo_mega.train, where it is run.

    Docstrings and comments do not count. Of a helper only what is imported counts, with all that this uses.
    """
    name = re.escape(program.rpartition("/")[2])
    return any(re.search(rf"(?<![\w.]){name}(?!\w)", text) for text in _texts(place))


@cache
def _texts(place: Path) -> tuple[str, ...]:
    folder = place if place.is_dir() else place.parent
    tests = sorted(place.rglob("test_*.py")) if place.is_dir() else [place]
    waiting: list[tuple[Path, str]] = [(path, "") for path in (*tests, *folder.rglob("conftest.py"))]
    seen, texts = set(waiting), []
    while waiting:
        path, definition = waiting.pop()
        texts.append(path.name)
        for node in _nodes(path, definition):
            if isinstance(node, ast.Constant):
                texts.append(str(node.value))
            elif isinstance(node, ast.ImportFrom):
                texts += [f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)]
            new = {*_leads(path, node)} - seen
            seen |= new
            waiting += new
    return tuple(texts)


def _leads(path: Path, node: ast.AST) -> Iterator[tuple[Path, str]]:
    """(file, definition in it, "" for all) of what a part of a file uses."""
    if isinstance(node, ast.Name):
        yield path, node.id
    elif isinstance(node, ast.ImportFrom) and node.module in HELPERS:
        yield from ((HELPERS[node.module], alias.name) for alias in node.names)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # a program that is started by its file's name
        yield from ((HELPERS[name], "") for name in re.findall(r"(\w+)\.py\b", node.value) if name in HELPERS)


def _nodes(path: Path, definition: str) -> Iterator[ast.AST]:
    """Every part of a file's code, or of one of its definitions; of imports only the one that defines it."""
    for node in _tree(path).body:
        if isinstance(node, ast.ImportFrom) and definition:
            node = ast.ImportFrom(node.module, [a for a in node.names if (a.asname or a.name) == definition])
        if not definition or definition in _defined(node):
            yield from ast.walk(node)


def _defined(node: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]


@cache
def _tree(path: Path) -> ast.Module:
    """The file's code without its docstrings."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)):
            node.body = [part for part in node.body if not _is_text(part)]
    return tree


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
