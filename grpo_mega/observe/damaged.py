"""One error for whatever goes wrong when a file of a run is damaged or of another version."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def naming(files: str) -> Iterator[None]:
    """Context in which these files are read.

    Raises:
        ValueError: Their content has another shape than the body of the context expects; names the files.
    """
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{files} is damaged, or of another version: {error!r}") from error
