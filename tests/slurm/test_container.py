"""Training in a container sees what the configuration names, and the project's code before the image's.

Apptainer itself is not needed: a stand-in does what matters here. It hides the folder in which runs, data and weights
lie but for what is bound, starts in the folder it is told, and lets the image's variables win.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from cluster import SEARCH, Cluster
from launches import submit

pytestmark = pytest.mark.long

SRUN = """#!/bin/bash
[[ $* != --help ]] || {{ echo --container-image && exit; }}
words=()
for word; do
    if [[ $word == --container-* ]]; then container+=" $word"; else words+=("$word"); fi
done
echo "${{words[*]}}$container" >>{log}
exec /usr/bin/srun "${{words[@]}}"
"""
"""Passes for an srun with pyxis: notes what it is asked, and runs it without a container."""

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
export binds folder PYTHONPATH={hidden}/image
exec unshare --mount bash -c '
    kept=$(mktemp -d) && mount -t tmpfs none "$kept" && mkdir -p "$kept{hidden}"
    for bind in ${{binds//,/ }}; do
        mkdir -p "$kept${{bind#*:}}" && mount --rbind "${{bind%%:*}}" "$kept${{bind#*:}}" || exit 255
    done
    mkdir -p "$kept{hidden}/image" && mount --rbind {hidden}/image "$kept{hidden}/image"
    mount --rbind "$kept{hidden}" {hidden}
    cd "$folder" && exec "$@"' apptainer "$@"
"""


@pytest.fixture
def hidden(cluster: Cluster, tmp_path: Path) -> Path:
    """A folder that containers do not see but for an image, which would bring a package of its own."""
    if os.getuid():
        pytest.skip("hiding folders with mounts needs root")
    package = tmp_path / "image" / "grpo_mega"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the package of the image')")
    program = cluster.root / "bin" / "apptainer"
    program.parent.mkdir()
    program.write_text(STAND_IN.format(hidden=tmp_path))
    program.chmod(0o755)
    return tmp_path


def test_what_the_configuration_names_is_there_and_the_projects_code_comes_first(cluster, hidden):
    first = submit(cluster, "first", "run.steps=1")
    assert first.finish() == "COMPLETED", first.log
    (hidden / "store").mkdir()
    (hidden / "models").mkdir()
    shutil.move(first.run / "checkpoints" / "step-000001", hidden / "store" / "blob")
    (hidden / "models" / "mine").symlink_to(hidden / "store" / "blob")
    inside = {"RUNTIME": "apptainer", "IMAGE": f"{hidden}/image", "PATH": f"{cluster.root}/bin:{SEARCH}"}
    settings = ["run.steps=1", f"run.root={hidden}/runs", f"run.init_from={hidden}/models/mine"]
    second = submit(cluster, "second", *settings, MAX_FAILURES="1", **inside)
    assert second.finish() == "COMPLETED", second.log
    assert second.steps() == [1]


def test_with_pyxis_the_image_is_unpacked_before_the_checks_and_used_by_every_step(cluster, tmp_path):
    log, program = tmp_path / "sruns", tmp_path / "bin" / "srun"
    program.parent.mkdir()
    program.write_text(SRUN.format(log=log))
    program.chmod(0o755)
    inside = {"RUNTIME": "pyxis", "IMAGE": "registry#image", "PATH": f"{program.parent}:{SEARCH}"}
    launch = submit(cluster, "pyxis", "run.steps=1", **inside)
    assert launch.finish() == "COMPLETED", launch.log
    first, *others = log.read_text().splitlines()
    assert " true --container-image=registry#image" in first
    assert len(others) == 2, "the checks and the ranks"
    assert all(f" --container-name=grpo_mega-{launch.number} " in line for line in (first, *others))
