"""A field that nobody reads, or that nobody explained, is a bug.

`test_every_field_is_read` looks at the whole product: it fails until the room that a field belongs to uses it.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

import grpo_mega
from grpo_mega.colocation.lease import State
from grpo_mega.config import schema

PRODUCT = Path(grpo_mega.__file__).parent
CLASSES = [
    value
    for value in vars(schema).values()
    if inspect.isclass(value) and is_dataclass(value) and value.__module__.startswith(schema.__name__)
]


@pytest.fixture(scope="module")
def attributes_read() -> set[str]:
    """Every attribute name that the product reads, the config room left out."""
    files = [path for path in PRODUCT.rglob("*.py") if PRODUCT / "config" not in path.parents]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    return read | {state.value for state in State}  # the lease looks a state's limit up by the state's name


def unread(owner: type, attributes: set[str]) -> list[str]:
    return [field.name for field in fields(owner) if field.name not in attributes]


@pytest.mark.parametrize("owner", CLASSES, ids=lambda owner: owner.__name__)
def test_every_field_is_read(owner: type, attributes_read: set[str]) -> None:
    assert unread(owner, attributes_read) == [], "no room reads them: use them or delete them from the schema"


def test_a_field_that_nobody_reads_is_noticed(attributes_read: set[str]) -> None:
    planted = make_dataclass("Planted", [("planted", int, 0)], bases=(schema.RunConfig,))
    assert unread(planted, attributes_read) == ["planted"]


@pytest.mark.parametrize("owner", CLASSES, ids=lambda owner: owner.__name__)
def test_every_field_has_a_docstring(owner: type) -> None:
    (tree,) = ast.parse(inspect.getsource(owner)).body
    hints = get_type_hints(owner)
    of_a_base = {field.name for base in owner.__bases__ if is_dataclass(base) for field in fields(base)}
    documented = of_a_base | {
        before.target.id
        for before, after in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }
    settings = {field.name for field in fields(owner) if not is_dataclass(hints[field.name])}
    assert settings <= documented
