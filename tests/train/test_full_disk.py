"""A checkpoint that cannot be written ends every rank, says why, and leaves the ones before it as they were."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from train_jobs import REPOSITORY, Ended, Job, contents, half_written, numbers

pytestmark = pytest.mark.long

LIMITED = """
import os, resource
if os.environ.get("RANK") == os.environ["LIMITED_RANK"]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
"""
"""A sitecustomize.py: files of one rank, and of the processes it starts, cannot grow past this size."""


def copied(finished, folder: Path) -> Path:
    """The finished run of three steps, as another run in `folder`."""
    path = folder / "full"
    shutil.copytree(finished.path, path)
    (path / "run.json").write_text((path / "run.json").read_text().replace('"first"', '"full"'))
    return path


def continued(finished, root: Path, environment: dict[str, str] | None = None) -> Ended:
    """One step more, and its checkpoint."""
    overrides = [*finished.overrides, "run.name=full", "run.steps=4"]
    return Job(root, overrides, ranks=2, environment=environment).finish()


def assert_lost_nothing(ended: Ended, path: Path, before: dict[str, str], words: list[str]) -> None:
    assert ended.code not in (0, 75), ended
    assert ended.orphans == []
    said = " ".join(ended.stderr.split())
    assert [
        w for w in [*words, "step-000004 cannot be written", "bytes are free in", "make room"] if w not in said
    ] == []
    assert contents(path / "checkpoints") == before
    assert half_written(path) == []
    assert not (path / "checkpoints" / ".step-000004.tmp").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_that_cannot_write_ends_all(finished, tmp_path, rank):
    path = copied(finished, tmp_path / "runs")
    before = contents(path / "checkpoints")
    (tmp_path / "sitecustomize.py").write_text(LIMITED)
    own = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}:{Path(__file__).parent}", "LIMITED_RANK": str(rank)}
    ended = continued(finished, tmp_path, own)
    # torch says so in its own words, which depend on where the limit was hit.
    assert_lost_nothing(ended, path, before, [f"cannot be written: rank {rank}: Worker failure: "])


def test_a_full_disk_is_named_and_the_run_goes_on_when_there_is_room(finished, tmp_path, small_disk):
    path = copied(finished, small_disk)
    before = contents(path / "checkpoints")
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - 1_000_000))
    assert_lost_nothing(continued(finished, tmp_path), path, before, ["cannot be written: rank "])
    ballast.unlink()
    ended = continued(finished, tmp_path)
    assert ended.code == 0, ended
    assert "continuing after step 3" in ended.stderr
    assert [line["step"] for line in numbers(path)] == [1, 2, 3, 4]
