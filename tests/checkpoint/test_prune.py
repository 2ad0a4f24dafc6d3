"""Which checkpoints are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_mega.platform import start

start()  # before megatron.core is imported

from grpo_mega.checkpoint.checkpoint import prune, step_path, steps_of  # noqa: E402
from grpo_mega.platform.manifest import MANIFEST  # noqa: E402


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
    prune(step_path(tmp_path, step), keep, keep_every)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {step_path(tmp_path, other).name for other in kept} | {"step-of-mine"}


@pytest.mark.parametrize(
    ("present", "newest", "keep", "keep_every", "kept"),
    [
        # The newest is kept, and beside it as many between steps as after any other save.
        (["10", "20", "20-updates-0003"], "20-updates-0003", 1, 0, ["20", "20-updates-0003"]),
        (["10", "20", "20-updates-0003"], "20-updates-0003", 2, 0, ["10", "20", "20-updates-0003"]),
        # One within a step has served as soon as there is a newer one, and is no milestone.
        (["20", "20-updates-0003", "20-updates-0012"], "20-updates-0012", 1, 0, ["20", "20-updates-0012"]),
        (["20", "20-updates-0003", "21"], "21", 2, 0, ["20", "21"]),
        (["20", "20-updates-0003", "21"], "21", 1, 20, ["20", "21"]),
        # No update and ten thousand; the run fell back from the latter.
        (["20", "20-updates-0000"], "20-updates-0000", 1, 0, ["20", "20-updates-0000"]),
        (["20", "20-updates-9999", "20-updates-10000"], "20-updates-9999", 1, 0, ["20", "20-updates-9999"]),
    ],
)
def test_a_checkpoint_within_a_step_stays_while_it_is_the_newest(tmp_path, present, newest, keep, keep_every, kept):
    for other in present:
        (tmp_path / f"step-0000{other}").mkdir()
    prune(tmp_path / f"step-0000{newest}", keep, keep_every)
    assert {path.name for path in tmp_path.iterdir()} == {f"step-0000{other}" for other in kept}


@pytest.mark.parametrize(
    ("newest", "kept"),
    [
        ("step-000002", ["step-000002"]),
        ("2-sft-step-000030", ["2-sft-step-000020", "2-sft-step-000030"]),
        ("1-pretrain-step-000200", ["1-pretrain-step-000200"]),
    ],
)
def test_checkpoints_of_earlier_stages_have_served_and_those_of_later_ones_were_fallen_back_from(
    tmp_path: Path, newest: str, kept: list[str]
) -> None:
    for name in ("1-pretrain-step-000200", "2-sft-step-000020", "2-sft-step-000030", "step-000002"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text("{}")
    prune(tmp_path / newest, keep=2, keep_every=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


def test_steps_of_a_checkpoint_are_those_of_the_last_stage(tmp_path: Path) -> None:
    assert steps_of(step_path(tmp_path, 12)) == 12
    assert steps_of(step_path(tmp_path, 12, earlier_stage=(1, "sft"))) == 0
    assert steps_of(tmp_path) == 0
