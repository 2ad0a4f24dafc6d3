"""A sandbox of each mechanism, for the tests of this room."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from grpo_mega.judges.sandbox import Sandbox, SandboxUnavailable
from grpo_mega.judges.sandbox.pool import MECHANISMS


@pytest.fixture(scope="module", params=MECHANISMS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """With two boxes. Programs that run one after the other run in the same one."""
    try:
        made = Sandbox(boxes=2, mechanism=request.param)
    except SandboxUnavailable as missing:
        pytest.skip(str(missing))
    yield made
    made.close()
