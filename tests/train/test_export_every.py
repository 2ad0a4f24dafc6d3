"""A run exports its policy now and then; what goes wrong with that does not end it."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
from exporting import assert_same, exported
from train_jobs import REPOSITORY, SMALL, Ended, Job, half_written, numbers, rewarded_by

OVERRIDES = [*SMALL, rewarded_by("varied"), "run.name=exporting", "run.save_every=1"]

KILLED = """
import os, signal
fsync = os.fsync

def deadly(descriptor):
    if "/export/" in os.readlink(f"/proc/self/fd/{descriptor}"):
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(descriptor)

os.fsync = deadly
"""
"""A sitecustomize.py: kill -9 in the middle of the first export."""


def started(root: Path, *more: str, ranks: int = 0, environment: dict[str, str] | None = None) -> Ended:
    return Job(root, [*OVERRIDES, *more], ranks=ranks, environment=environment).finish()


def steps(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "runs" / "exporting" / "export").iterdir())


@pytest.mark.long
def test_every_so_often_and_at_the_end_what_the_tool_would_write(tmp_path: Path) -> None:
    ended = started(tmp_path, "run.steps=5", "run.export_every=2", "run.keep_checkpoints=9", ranks=2)
    assert ended.code == 0, ended.stderr
    run = tmp_path / "runs" / "exporting"
    assert steps(tmp_path) == ["step-000002", "step-000004", "step-000005"]
    assert half_written(run) == []
    for step in (2, 5):
        mine, theirs = run / "export" / f"step-{step:06d}", tmp_path / f"tool-{step}"
        exported(run / "checkpoints" / f"step-{step:06d}", theirs)
        assert_same(mine, theirs)
        assert {file.name for file in mine.iterdir()} == {file.name for file in theirs.iterdir()}
        assert (mine / "config.json").read_text() == (theirs / "config.json").read_text()
        cards = [(folder / "README.md").read_text().rsplit("```\n", 2)[0] for folder in (mine, theirs)]
        assert cards[0] == cards[1], "but for the command"
    card = (run / "export" / "step-000005" / "README.md").read_text()
    assert "torchrun --nproc-per-node 2 -m grpo_mega.train experiment=tiny" in card
    assert "| held-out, step 5 |" in card
    third = next(line for line in map(json.loads, (run / "metrics.jsonl").open()) if line["step"] == 3)
    assert third["time/export"] > 0
    parts = {name: x for name, x in third.items() if name.startswith("time/") and name != "time/step"}
    apart = sum(parts[f"time/{name}"] for name in ("checkpoint", "export"))
    assert third["time/step"] == pytest.approx(sum(parts.values()) - apart)


@pytest.mark.long
def test_a_model_of_no_family_is_refused_before_it_is_trained(tmp_path: Path) -> None:
    ended = started(tmp_path, "run.steps=1", "run.export_every=-1", "model.moe.shared_ffn_hidden=0", "layout=single")
    assert ended.code == 2
    assert "run.export_every=-1: Glm4MoeForCausalLM, the closest Hugging Face model, cannot express" in ended.stderr
    assert not (tmp_path / "runs" / "base-models").exists()


@pytest.mark.long
def test_one_that_fails_is_a_warning_and_the_next_is_tried(tmp_path: Path) -> None:
    common = ("layout=single", "run.export_every=1")
    assert (ended := started(tmp_path, "run.steps=1", "layout=single")).code == 0, ended.stderr
    run = tmp_path / "runs" / "exporting"
    (run / "export").write_text("in the way")
    ended = started(tmp_path, "run.steps=3", *common)
    assert ended.code == 0, ended.stderr
    said = " ".join(ended.stderr.split())
    for step in (1, 2, 3):
        assert f"the export {run}/export/step-00000{step} was not written: rank 0: " in said
    assert "NotADirectoryError" in said
    assert json.loads((run / "summary.json").read_text())["status"] == "completed"
    (run / "export").unlink()
    ended = started(tmp_path, "run.steps=4", *common)
    assert ended.code == 0, ended.stderr
    assert steps(tmp_path) == ["step-000003", "step-000004"]
    assert [line["step"] for line in numbers(run)] == [1, 2, 3, 4]


@pytest.mark.long
def test_parameters_that_the_next_pass_would_gather_are_whole(tmp_path: Path) -> None:
    """A checkpoint gathers them too: without one, the export has the same bits."""
    overlap = ("optimizer.distributed=true", "optimizer.overlap=true", "run.steps=3", "run.export_every=2")
    for save_every in (0, 2):
        (tmp_path / str(save_every)).mkdir()
        ended = started(tmp_path / str(save_every), *overlap, f"run.save_every={save_every}", ranks=2)
        assert ended.code == 0, ended.stderr
    without, after_a_checkpoint = (tmp_path / name / "runs" / "exporting" / "export" / "step-000002" for name in "02")
    assert_same(without, after_a_checkpoint)


@pytest.mark.long
def test_a_checkpoint_has_room_after_it(tmp_path: Path, small_disk: Path) -> None:
    """On a disk with room for a checkpoint and a fifth, which an export would leave too little of."""
    assert (ended := started(tmp_path, "run.steps=1", "layout=single")).code == 0, ended.stderr
    checkpoints = small_disk / "exporting" / "checkpoints"
    size = sum(file.stat().st_size for file in (checkpoints / "step-000001").rglob("*"))
    (small_disk / "ballast").write_bytes(bytes(shutil.disk_usage(small_disk).free - size * 6 // 5))
    ended = started(tmp_path, "run.steps=3", "layout=single", "run.export_every=1", "run.keep_checkpoints=1")
    assert ended.code == 0, ended.stderr
    assert "step-000002 was not written: " in " ".join(ended.stderr.split())
    assert "it and the next checkpoint need" in " ".join(ended.stderr.split())
    assert [path.name for path in checkpoints.iterdir()] == ["step-000003"]
    assert half_written(small_disk / "exporting") == []


@pytest.mark.long
def test_one_that_was_killed_is_written_by_the_same_command(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(KILLED)
    own = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}:{Path(__file__).parent}"}
    common = ("run.steps=2", "run.export_every=1", "layout=single")
    ended = started(tmp_path, *common, environment=own)
    assert ended.code == -signal.SIGKILL, ended
    run = tmp_path / "runs" / "exporting"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000001"]
    assert steps(tmp_path) == [".step-000001.lock", ".step-000001.tmp"]
    assert (ended := started(tmp_path, *common)).code == 0, ended.stderr
    assert steps(tmp_path) == ["step-000001", "step-000002"]
    exported(run / "checkpoints" / "step-000001", tmp_path / "tool")
    assert_same(run / "export" / "step-000001", tmp_path / "tool")
