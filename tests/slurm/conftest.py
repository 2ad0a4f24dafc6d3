"""A cluster per module; it skips, with what to install, where Slurm is missing."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, missing


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if why := missing():
        pytest.skip(why)
    root = Path(tempfile.mkdtemp(prefix="slurm-"))  # pytest's own folders are too long for Unix sockets
    started = Cluster(root, nodes=4)
    try:
        yield started.start()
    finally:
        started.stop()
        shutil.rmtree(root, ignore_errors=True)
