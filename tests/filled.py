"""Values of any type in which nothing is what its constructor puts there by itself."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields, is_dataclass
from operator import ne
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

NUMBERS = st.floats(allow_nan=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBERS | st.text(),
    lambda inside: st.lists(inside, max_size=2) | st.dictionaries(st.text(), inside, max_size=2),
    max_leaves=4,
)


def filled(kind: Any, known: dict[type, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Values of a type: no collection is empty, and no field of a dataclass has its default.

    They are made from the fields and their types, so that a new field is in them without anybody thinking of it.
    `known` has strategies for types that cannot be made this way, such as tensors.
    """
    origin, inside = get_origin(kind), get_args(kind)
    if kind in known:
        return known[kind]
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        named = {field.name: filled(hints[field.name], known).filter(differs_from(field)) for field in fields(kind)}
        return st.builds(kind, **named)
    if origin is UnionType:
        return st.one_of([filled(part, known) for part in inside if part is not NoneType])
    if origin is dict:
        return st.dictionaries(*(filled(part, known) for part in inside), min_size=1, max_size=2)
    if origin is list or (origin is tuple and inside[1:] == (...,)):
        return st.lists(filled(inside[0], known), min_size=1, max_size=3).map(origin)
    if origin is tuple:
        return st.tuples(*(filled(part, known) for part in inside))
    return {float: NUMBERS, Any: JSON}.get(kind, st.from_type(kind))


def differs_from(field: Field[Any]) -> Any:
    """Whether a value is not the field's default."""
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    return lambda value: ne(value, default)
