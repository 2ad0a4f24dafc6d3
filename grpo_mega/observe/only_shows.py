"""What only shows a run must not end it: an error in it is logged with its traceback, and the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class OnlyShows:
    """Guards what a run can do without: `with only_shows("samples/"): ...`.

    The body must not contain a collective: a rank that leaves it early would let the others wait.
    """

    def __init__(self) -> None:
        self._logged = set[tuple[str, type[Exception]]]()

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Ends the body at an error, and logs the first error of each type in `what`: more would come every step."""
        try:
            yield
        except Exception as error:
            kind = what, type(error)
            if kind not in self._logged:
                self._logged.add(kind)
                name = type(error).__name__
                logger.warning("%s: %s: %s; the run goes on without it", what, name, error, exc_info=True)
