"""What holds for every test."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Assertions of modules that tests share show what they compared, as those of tests do.
pytest.register_assert_rewrite(*(file.stem for file in Path(__file__).parent.rglob("*.py") if file.stem != "conftest"))

# A machine that is busy with other jobs is no failure. Where `CI` is set every run has the same examples, elsewhere
# each has others, so that what no run has tried comes up on somebody's machine and not in a merge.
settings.register_profile("tests", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("tests")

LONGEST = ("slurm", "train", "recipe", "stages", "evaluate", "planning", "parity", "rollout", "checkpoint", "models")
"""Rooms whose files take longest, as they start jobs of several processes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with the files that take longest: one that came last would leave the other process without work."""
    order = {room: number for number, room in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.parent.name, len(order)))
