"""A cluster per module; it skips, with what to install, where Slurm is missing."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import SMALL_DISK, Cluster, missing


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if why := missing():
        pytest.skip(why)
    root = Path(tempfile.mkdtemp(prefix="slurm-"))  # pytest's own folders are too long for Unix sockets
    started = Cluster(root, nodes=4)
    small = root / SMALL_DISK
    small.mkdir()
    # Where that is permitted; the nodes see only what was mounted before they were started.
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "none", small], capture_output=True)
    try:
        yield started.start()
    finally:
        started.stop()
        if mounted.returncode == 0:
            subprocess.run(["umount", "--lazy", small], check=True)
        shutil.rmtree(root, ignore_errors=True)
