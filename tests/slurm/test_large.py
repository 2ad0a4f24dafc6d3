"""The 671B job as a user submits it, on 64 nodes whose GPUs nothing can compute on: it goes as far as those allow."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, missing
from launches import REPOSITORY, submitted


@pytest.fixture(scope="module")
def large() -> Iterator[Cluster]:
    if why := missing():
        pytest.skip(why)
    root = Path(tempfile.mkdtemp(prefix="slurm-"))
    started = Cluster(root, nodes=64, gpus=8)
    try:
        yield started.start()
    finally:
        started.stop()
        shutil.rmtree(root, ignore_errors=True)


@pytest.mark.skipif(not (REPOSITORY / "configs/experiment/r1zero_671b.yaml").exists(), reason="no such experiment yet")
@pytest.mark.parametrize(("script", "nodes"), [("r1zero_671b", 64), ("r1zero_671b_h200", 32)])
def test_it_is_checked_queued_and_ends_with_the_code_for_unfit_nodes(large, tmp_path, script, nodes):
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text('{"prompt": "1+1=?", "answer": 2}\n')
    data = [f"data.train_path={tmp_path}/train.jsonl", f"data.test_path={tmp_path}/test.jsonl"]
    settings = [f"run.root={large.root}/runs", f"run.init_from={tmp_path}", *data]
    launch = submitted(large, large.run(REPOSITORY / "slurm" / f"{script}.sh", *settings, PYTHON=sys.executable))
    assert launch.finish() == "FAILED"
    assert large.job(launch.number)["ExitCode"] == "3:0"
    assert large.job(launch.number)["NumNodes"] == str(nodes)
    assert launch.status["state"] == "unfit"
    report = (launch.files / "report.txt").read_text()
    assert report.count(" unfit: ") == nodes
    assert "GPUs per node" in report or "nvidia-ml-py is not installed" in report
    assert large.jobs() == []
