"""Training in a container sees what the configuration names, and the project's code before the image's.

Apptainer itself is not needed: a stand-in does what matters here. It hides the folder in which runs, data and weights
lie but for what is bound, starts in the folder it is told, and lets the image's variables win.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from cluster import Cluster
from launches import submit

STAND_IN = """#!/bin/bash
[[ $1 == exec ]] && shift
while [[ $1 == --* ]]; do
    case $1 in
        --nv) shift ;;
        --bind) binds=$2 && shift 2 ;;
        --pwd) folder=$2 && shift 2 ;;
        *) echo "apptainer: unknown option $1" >&2 && exit 255 ;;
    esac
done
shift # the image
export binds folder PYTHONPATH={root}/image OMP_NUM_THREADS=100 MASTER_PORT=1 NODES=100
exec unshare --mount bash -c '
    kept=$(mktemp -d) && mount -t tmpfs none "$kept"
    for bind in ${{binds//,/ }}; do
        mkdir -p "$kept${{bind#*:}}" && mount --rbind "${{bind%%:*}}" "$kept${{bind#*:}}" || exit 255
    done
    mkdir -p "$kept{root}"
    mount --rbind "$kept{root}" {root}
    cd "$folder" && exec "$@"' apptainer "$@"
"""


@pytest.fixture
def store(cluster: Cluster) -> Path:
    """A folder outside the working directory and the runs, and an image that would bring a package of its own."""
    if os.getuid():
        pytest.skip("hiding folders with mounts needs root")
    package = cluster.root / "image" / "grpo_mega"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the package of the image')")
    program = cluster.root / "bin" / "apptainer"
    program.parent.mkdir()
    program.write_text(STAND_IN.format(root=cluster.root))
    program.chmod(0o755)
    (cluster.root / "image.sif").touch()
    (cluster.root / "store").mkdir()
    return cluster.root / "store"


def test_what_the_configuration_names_is_there_and_the_jobs_variables_win(cluster, store):
    first = submit(cluster, "first", "run.steps=1")
    assert first.finish() == "COMPLETED", first.log
    shutil.move(first.run / "checkpoints" / "step-000001", store / "blob")
    (cluster.root / "models").mkdir()
    (cluster.root / "models" / "mine").symlink_to(store / "blob")
    inside = {"RUNTIME": "apptainer", "IMAGE": f"{cluster.root}/image.sif", "HANG_SECONDS": "60"}
    path = f"{cluster.root}/bin:{cluster.environment['PATH']}"
    weights = f"run.init_from={cluster.root}/models/mine"
    second = submit(cluster, "second", "run.steps=1", weights, PATH=path, **inside)
    assert second.finish() == "COMPLETED", second.log + "".join(
        file.read_text() for file in sorted(second.files.glob("*/*.log")) + sorted(second.files.glob("*/preflight/log"))
    )
    assert second.steps() == [1]
