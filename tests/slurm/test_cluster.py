"""The cluster that the other tests rely on is a real one, trains, and leaves nothing behind."""

from __future__ import annotations

import pytest
from cluster import Cluster, wait_until
from launches import submit
from train_jobs import numbers

STEP = """#!/bin/bash
srun bash -c 'echo $SLURM_NODEID $(hostname); exec sleep $1' step "$1"
"""
STUBBORN = """#!/bin/bash
trap "" TERM
(trap "" TERM; exec setsid sleep 1000) &
wait
"""


def submitted(cluster: Cluster, text: str, *arguments: str, nodes: int) -> int:
    script = cluster.root / "step.sh"
    script.write_text(text)
    made = cluster.run("sbatch", "--parsable", f"--nodes={nodes}", "--output=%j.out", script, *arguments)
    assert made.returncode == 0, made.stderr
    return int(made.stdout)


def test_each_node_runs_its_task_under_its_own_name(cluster):
    number = submitted(cluster, STEP, "0", nodes=3)
    assert cluster.wait(number)["JobState"] == "COMPLETED"
    lines = (cluster.root / f"{number}.out").read_text().splitlines()
    assert sorted(lines) == ["0 node1", "1 node2", "2 node3"]


@pytest.mark.long
def test_a_killed_node_is_noticed_and_its_job_starts_again_elsewhere(cluster):
    number = submitted(cluster, STEP, "1000", nodes=2)
    lines = cluster.root / f"{number}.out"
    wait_until(lambda: lines.exists() and lines.read_text().count("node") == 2, "the tasks do not start")
    cluster.kill_node("node2")
    assert not cluster.processes(["node2"])
    wait_until(lambda: cluster.job(number)["Restarts"] == "1", "not requeued")
    assert "node2" not in cluster.wait(number, ["RUNNING"])["NodeList"]
    cluster.run("scancel", number)
    cluster.wait(number)
    wait_until(lambda: not cluster.processes(), "something lives on")
    cluster.revive()


def test_a_job_trains_on_two_nodes(cluster):
    """`slurm/tiny.sh`, shortened; tests/slurm/test_survival.py does to such jobs what happens to jobs."""
    launch = submit(cluster, "trained")
    assert launch.finish() == "COMPLETED", launch.log
    assert launch.steps() == [1, 2, 3, 4]
    assert all(line["policy/grad_norm"] > 0 for line in numbers(launch.run))
    assert (launch.status["state"], launch.status["step"]) == ("completed", "4")
    wait_until(lambda: not cluster.processes(), "something lives on")


def test_stopping_ends_what_ignores_every_polite_signal(cluster):
    submitted(cluster, STUBBORN, nodes=1)
    wait_until(lambda: [p for p in cluster.processes() if p.name() == "sleep"], "the job does not start")
    cluster.stop()
    assert cluster.processes() == []
