"""The environments of this folder, for its tests and the processes that these start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def paths() -> Iterator[None]:
    """The jobs find the environments of this folder, and what jobs of stages share."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in (HERE, HERE.parent / "stages"):
            patch.syspath_prepend(str(folder))
            patch.setenv("PYTHONPATH", str(folder), prepend=":")
        yield
