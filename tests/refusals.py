"""What is refused: input errors are compared by place and fact, so that their wording is free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from grpo_mega.errors import InputError


@contextmanager
def refused(expected: str) -> Iterator[pytest.ExceptionInfo[InputError]]:
    """Asserts that the block raises InputError.

    `expected` is "WHERE | FACT": a part of the error's where, and a part of what is wrong or of the fix.
    """
    with pytest.raises(InputError) as raised:
        yield raised
    where, _, fact = expected.partition(" | ")
    try:
        assert where in raised.value.where
        assert fact in f"{raised.value.what}; {raised.value.fix}"
    finally:
        del raised  # its traceback holds this frame: the circle would keep the block's objects, and their processes
