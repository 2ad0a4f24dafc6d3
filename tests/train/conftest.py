"""One folder for all runs, in which the first run leaves the base model that the others take from its cache."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from metric_lines import of_steps
from train_jobs import SMALL, Ended, Job, contents, rewarded_by


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own of 64 MiB at `tmp_path`/runs, where mounting is permitted."""
    folder = tmp_path / "runs"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", folder], capture_output=True).returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@dataclass(frozen=True)
class Finished:
    """A run of three steps on two ranks that nobody touched since."""

    root: Path
    path: Path
    overrides: list[str]
    ended: Ended
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    contents: dict[str, str]


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    root = tmp_path_factory.mktemp("train")
    path = root / "runs" / "first"
    overrides = [*SMALL, rewarded_by("varied"), "run.name=first", "run.steps=3", "run.save_every=2", "run.eval_every=2"]
    ended = Job(root, overrides, ranks=2).finish()
    assert ended.code == 0, ended
    summary, metrics = json.loads((path / "summary.json").read_text()), of_steps(path)
    return Finished(root, path, overrides, ended, summary, metrics, contents(path))
