"""What cannot run is refused when it is submitted, with the way out, and nothing is queued or left behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from cluster import Cluster
from launches import ENVIRONMENT, REPOSITORY, SMALL, start, submit, submitted


def assert_refused(cluster: Cluster, made: subprocess.CompletedProcess[str], *words: str) -> None:
    assert made.returncode == 2, made
    assert made.stderr.startswith("error: ")
    assert [word for word in words if word not in made.stderr] == [], made.stderr
    assert cluster.jobs() == []


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["--partition=gpu"], {}, ["invalid partition", "--partition=NAME", "main* 4 (null)"]),
        (["--gpus-per-node=8"], {"GPUS_PER_NODE": "8"}, ["not available", "2 nodes with 8 GPUs", "layout=NAME"]),
        ([], {"GPUS_PER_NODE": "8"}, ["not available", "2 nodes with 8 GPUs"]),
        ([], {"NODES": "8", "RANKS_PER_NODE": "1"}, ["8 nodes", "NODES=N", "main* 4"]),
        (
            ["layout=pp2"],
            {"NODES": "3", "RANKS_PER_NODE": "1"},
            ["world size 3 is not divisible", "start 2 or 4 processes"],
        ),
        (["run.stps=3"], {}, ["run.stps"]),
        (["experiment=absent"], {}, ["absent", "tiny"]),
        (["run.init_from=/absent/model"], {}, ["run.init_from=/absent/model does not exist"]),
        ([], {"RUNTIME": "apptainer"}, ["RUNTIME=apptainer needs IMAGE", "export IMAGE="]),
        ([], {"RUNTIME": "apptainer", "IMAGE": "/absent.sif"}, ["IMAGE=/absent.sif does not exist"]),
        ([], {"RUNTIME": "pyxis", "IMAGE": "registry#image:1"}, ["--container-image", "pyxis plugin"]),
        ([], {"RUNTIME": "docker"}, ["docker is none of: bare, apptainer, pyxis"]),
        ([], {"CLUSTER": "mars"}, ["CLUSTER=mars has no profile", "default"]),
        (["--signal=B:USR1@60"], {}, ["STOP_SECONDS=0 is no time to save in", "--signal=B:USR1@90"]),
        (["--nodes=3"], {}, ["--nodes=3 says nothing of spares", "NODES=N"]),
        (["cluster.nodes=3"], {}, ["cluster.nodes=3", "trains on 2 nodes", "cluster.nodes=2", "NODES=3"]),
    ],
)
def test_what_cannot_run_is_not_queued(cluster, arguments, environment, words):
    environment = {"RANKS_PER_NODE": "2"} | environment
    made = start(cluster, "refused", *arguments, **environment)
    assert_refused(cluster, made, *words)
    assert not (cluster.root / "runs" / "refused").exists()


def test_an_interpreter_without_hydra_is_named(cluster):
    bare = cluster.root / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    made = start(cluster, "refused", HOST_PYTHON=str(bare))
    assert_refused(cluster, made, "has no hydra", "set PYTHON", "pip install hydra-core")


def test_the_directory_of_another_experiment_is_not_touched(cluster):
    path = cluster.root / "runs" / "other"
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps({"run.seed": 5}))
    assert_refused(cluster, start(cluster, "other"), "belongs to another experiment", "run.seed: 5 there, 0 now")
    assert [entry.name for entry in path.iterdir()] == ["run.json"]


def test_a_tokenizer_that_may_be_a_program_is_warned_of(cluster, tmp_path):
    (tmp_path / "problems.jsonl").write_text('{"prompt": "1+1=?", "answer": 2}\n')
    files = [f"data.{name}_path={tmp_path}/problems.jsonl" for name in ("train", "test")]
    settings = ["data=boxed", *files, f"data.tokenizer={tmp_path}", "model.vocab_size=64"]
    made = start(cluster, "spoken_for", "--hold", *settings)
    assert f"warning: data.tokenizer={tmp_path} has no tokenizer.json; code of its own is not run" in made.stderr
    (tmp_path / "tokenizer.json").touch()
    again = start(cluster, "spoken_for", "--hold", *settings)
    assert "tokenizer" not in again.stderr
    for one in (made, again):
        cluster.run("scancel", submitted(cluster, one).number)


def test_without_slurm_it_says_how_to_run_all_the_same(tmp_path):
    found = {
        name: f"/usr/bin/{name}"
        for name in ("bash", "dirname", "basename", "paste", "grep", "head")
        if os.path.exists(f"/usr/bin/{name}")
    }
    for name, program in found.items():
        (tmp_path / name).symlink_to(program)
    command = [found["bash"], REPOSITORY / "slurm" / "tiny.sh", *SMALL]
    made = subprocess.run(command, env={"PATH": str(tmp_path), "PYTHON": "python3"}, text=True, capture_output=True)
    assert made.returncode == 2
    assert made.stderr.startswith("error: there is no Slurm here")
    assert (
        "torchrun --standalone --nproc-per-node N -m grpo_mega.train experiment=tiny layout=ep2 base=none"
        in made.stderr
    )


def test_a_queued_job_keeps_the_code_it_was_submitted_with(cluster):
    launch = submit(cluster, "held", "--hold")
    (code,) = (launch.run / "slurm").glob("code-*")
    for name in ("grpo_mega/trainer.py", "slurm/lib/job.sh", "configs/experiment/tiny.yaml"):
        assert (code / name).read_bytes() == (REPOSITORY / name).read_bytes()
    job = cluster.job(launch.number)
    assert job["Command"].startswith(f"{code}/slurm/tiny.sh")
    assert job["NumNodes"].split("-")[0] == "2"
    again = submit(cluster, "held", "--hold")
    assert list((again.run / "slurm").glob("code-*")) == [code], "the same code is there once"
    for number in cluster.jobs():
        cluster.run("scancel", number)


def test_from_within_an_allocation_a_script_submits_a_job_of_its_own(cluster):
    settings = [*SMALL, "run.name=within", f"run.root={cluster.root}/runs"]
    script = REPOSITORY / "slurm" / "tiny.sh"
    made = cluster.run("salloc", "--nodes=1", "--mem=17", script, "--hold", *settings, **ENVIRONMENT)
    launch = submitted(cluster, made)
    job = cluster.job(launch.number)
    assert (job["JobState"], job["NumNodes"].split("-")[0]) == ("PENDING", "2")
    assert job.get("MinMemoryNode") != "17M"
    cluster.run("scancel", launch.number)


def test_status_of_what_has_not_started_says_so(cluster):
    made = cluster.run(REPOSITORY / "slurm" / "status.sh", "999")
    assert made.returncode == 2
    assert re.match(r"error: Slurm knows no job 999", made.stderr)
    made = cluster.run(REPOSITORY / "slurm" / "status.sh", cluster.root)
    assert made.returncode == 2
    assert "has no slurm/status" in made.stderr
