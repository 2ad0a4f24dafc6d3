"""The 671B job as a user submits it, on 64 nodes whose GPUs nothing can compute on: it goes as far as those allow."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, missing
from launches import REPOSITORY, submitted

from grpo_mega.config.load import compose_config

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def large() -> Iterator[Cluster]:
    if why := missing():
        pytest.skip(why)
    root = Path(tempfile.mkdtemp(prefix="slurm-"))
    started = Cluster(root, nodes=64, gpus=8, silence=300)
    try:
        yield started.start()
    finally:
        started.stop()
        shutil.rmtree(root, ignore_errors=True)


GPU_NODE = """
import os, torch
torch.cuda.is_available = lambda: os.environ.get("CUDA_VISIBLE_DEVICES") != ""
torch.cuda.set_device = lambda device: None
"""
"""What Python does first on a node where torch finds GPUs, as long as nobody hides them."""


def settings(large: Cluster, data: Path) -> list[str]:
    for name in ("train.jsonl", "test.jsonl"):
        (data / name).write_text('{"prompt": "1+1=?", "answer": 2}\n')
    (data / "tokenizer.json").touch()
    paths = [f"data.train_path={data}/train.jsonl", f"data.test_path={data}/test.jsonl", f"data.tokenizer={data}"]
    # The released weights, whose files a submit checks, are not here.
    return [f"run.root={large.root}/runs", *paths, "run.init_from=null"]


def start(large: Cluster, data: Path, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [REPOSITORY / "slurm" / f"{script}.sh", *settings(large, data)]
    return large.run(*command, **{"PYTHON": sys.executable} | environment)


@pytest.mark.parametrize(("script", "nodes"), [("r1zero_671b", 64), ("r1zero_671b_h200", 32)])
def test_it_is_checked_queued_and_ends_with_the_code_for_unfit_nodes(large, tmp_path, script, nodes):
    launch = submitted(large, start(large, tmp_path, script))
    assert launch.finish() == "FAILED"
    assert large.job(launch.number)["ExitCode"] == "3:0"
    assert large.job(launch.number)["NumNodes"] == str(nodes)
    assert launch.status["state"] == "unfit"
    report = (launch.files / "report.txt").read_text()
    assert report.count(" unfit: ") == nodes
    checkpoint = 16 * (671_026_419_200 + 11_610_068_224)
    assert report.count(f" MiB free and needs {(checkpoint >> 20) + 1024}: make room") == nodes
    assert "GPUs per node" in report or "nvidia-ml-py is not installed" in report
    assert large.jobs() == []


def test_a_checkpoint_that_cannot_be_written_before_the_time_limit_is_refused(large, tmp_path):
    made = start(large, tmp_path, "r1zero_671b", SAVE_GB_PER_SECOND="4")
    assert made.returncode == 2
    expected = "a checkpoint of 10,922 GB is written and read again in 5521 s at SAVE_GB_PER_SECOND=4, more than"
    assert made.stderr.startswith(f"error: STOP_SECONDS=4640: {expected}")
    assert "give --signal=B:USR1@5581 or more" in made.stderr
    made = start(large, tmp_path, "r1zero_671b", HANG_SECONDS="4300")
    assert made.returncode == 2
    assert "set HANG_SECONDS=4429 or more" in made.stderr
    assert large.jobs() == []


def test_a_script_given_to_sbatch_plans_its_checkpoint_on_a_node_with_gpus(large, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(GPU_NODE)
    log = large.root / "as_it_is.log"
    made = large.run(
        "sbatch", "--parsable", f"--output={log}", "slurm/moonlight_16b.sh", *settings(large, tmp_path),
        cwd=REPOSITORY, PYTHON=sys.executable, PYTHONPATH=str(tmp_path), MAX_EXCLUSIONS="0",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    large.wait(int(made.stdout))
    assert large.job(int(made.stdout))["ExitCode"] == "3:0", log.read_text()
    assert "cannot be planned" not in log.read_text()


def test_scripts_ask_to_be_told_of_their_time_limit_and_to_come_back():
    scripts = [path for path in (REPOSITORY / "slurm").glob("*.sh") if "#SBATCH" in path.read_text()]
    assert len(scripts) == 8
    for path in scripts:
        assert re.search(r"^#SBATCH --signal=B:USR1@\d+\n#SBATCH --requeue\n", path.read_text(), re.MULTILINE), path


def test_scripts_ask_for_the_machines_that_their_experiments_plan_for():
    scripts = [path for path in (REPOSITORY / "slurm").glob("*.sh") if "#SBATCH --gpus-per-node" in path.read_text()]
    assert len(scripts) == 6
    for path in scripts:
        asked = dict(re.findall(r"#SBATCH --(nodes|gpus-per-node)=(\d+)", path.read_text()))
        planned = compose_config([f"experiment={path.stem}"]).cluster
        assert (asked["nodes"], asked["gpus-per-node"]) == (str(planned.nodes), str(planned.gpus_per_node)), path
