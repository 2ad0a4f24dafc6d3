"""Which checkpoints are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_mega.platform import start

start()  # before megatron.core is imported

from grpo_mega.checkpoint.checkpoint import prune, step_path  # noqa: E402
from grpo_mega.checkpoint.integrity import MANIFEST  # noqa: E402


@pytest.mark.parametrize(
    ("present", "step", "keep", "keep_every", "kept"),
    [
        ([10, 20, 30], 30, 2, 0, [20, 30]),
        ([10, 20, 30], 30, 1, 10, [10, 20, 30]),
        ([90, 100, 110, 120], 120, 1, 100, [100, 120]),
        # The run fell back from the damaged 120 to 100 and has just saved 110.
        ([100, 110, 120], 110, 1, 0, [110]),
        ([999_990, 1_000_000], 1_000_000, 1, 0, [1_000_000]),
        ([10], 10, 5, 0, [10]),
    ],
)
def test_the_newest_and_the_milestones_stay(tmp_path: Path, present, step, keep, keep_every, kept):
    for other in present:
        path = step_path(tmp_path, other)
        path.mkdir()
        (path / MANIFEST).write_text("{}")
    (tmp_path / "step-of-mine").mkdir()
    prune(tmp_path, step, keep, keep_every)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {step_path(tmp_path, other).name for other in kept} | {"step-of-mine"}
