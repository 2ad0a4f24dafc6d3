"""Files of a run that are damaged, or of another version: one error for whatever their reader stumbles over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def naming(files: str) -> Iterator[None]:
    """A context that reads these files.

    Raises:
        ValueError: Their content has another shape than the body expects; names them.
    """
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{files} is damaged, or of another version: {error!r}") from error
