"""What cannot run is refused when it is submitted, with the fix, and nothing is queued or left behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from cluster import Cluster
from launches import ENVIRONMENT, REPOSITORY, SMALL, start, submit, submitted
from limits import limit
from safetensors.torch import save_file

from grpo_mega.config.schema import ModelConfig
from grpo_mega.weights.names import entries


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
            ["world size 3: not divisible", "start 2 or 4 processes"],
        ),
        (["run.stps=3"], {}, ["run.stps"]),
        (["experiment=absent"], {}, ["absent", "tiny"]),
        (["run.init_from=/absent/model"], {}, ["run.init_from=/absent/model: does not exist"]),
        ([], {"RUNTIME": "apptainer"}, ["RUNTIME=apptainer needs IMAGE", "export IMAGE="]),
        ([], {"RUNTIME": "apptainer", "IMAGE": "/absent.sif"}, ["IMAGE=/absent.sif does not exist"]),
        ([], {"RUNTIME": "pyxis", "IMAGE": "registry#image:1"}, ["--container-image", "pyxis plugin"]),
        ([], {"RUNTIME": "docker"}, ["docker is none of: bare, apptainer, pyxis"]),
        ([], {"CLUSTER": "mars"}, ["CLUSTER=mars has no profile", "default"]),
        (["--signal=B:USR1@60"], {}, ["STOP_SECONDS=0 is too short to save", "--signal=B:USR1@90"]),
        (["--nodes=3"], {}, ["--nodes=3 does not account for spares", "NODES=N"]),
        (["--time=1"], {}, ["--time=1 is 60 s", "300 s ahead of its end", "--time=16 or more"]),
        ([], {"SBATCH_TIMELIMIT": "00:05:30"}, ["--time=00:05:30 is 330 s"]),
        (["--time=3", "--signal=B:USR1@120"], {}, ["--time=3 is 180 s", "120 s ahead of its end"]),
        (["-p", "main"], {}, ["-p main: options of sbatch are one word here: --partition=main"]),
        (["-t", "30"], {}, ["-t 30: options of sbatch are one word here: --time=30"]),
        (["--qos", "high"], {}, ["--qos high: options of sbatch are one word here: --qos=high"]),
        (["high"], {}, ["high is not a setting of the experiment (FIELD=VALUE) and not an option of sbatch"]),
        (["+run.wandb=true"], {}, ["run.wandb: not a setting"]),
        (["run.root='two words'"], {}, ["run.root: Slurm jobs cannot use", "it contains ' '"]),
        (["cluster.nodes=3"], {}, ["cluster.nodes=3", "trains on 2 nodes", "cluster.nodes=2", "NODES=3"]),
    ],
)
def test_what_cannot_run_is_not_queued(cluster, arguments, environment, words):
    environment = {"RANKS_PER_NODE": "2"} | environment
    made = start(cluster, "refused", *arguments, **environment)
    assert_refused(cluster, made, *words)
    assert not (cluster.root / "runs" / "refused").exists()


def test_all_missing_files_are_named_at_once(cluster):
    absent = {
        "data.train_path": "/absent/train.jsonl",
        "data.test_path": "/absent/test.jsonl",
        "run.init_from": "/absent/model",
        "data.tokenizer": "/absent/tokenizer",
    }
    made = start(cluster, "refused", "data=boxed", *(f"{name}={path}" for name, path in absent.items()))
    assert_refused(cluster, made, *(f"{name}={path}: does not exist" for name, path in absent.items()))


TINY_DENSE = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
"""The config.json of a Llama of the shape of model=tiny_dense."""


@pytest.mark.long
def test_a_model_of_another_shape_is_refused_as_loading_it_would_be(cluster, tmp_path):
    settings = ["model=tiny_dense", "layout=single", f"run.init_from={tmp_path}", "model.vocab_size=64"]
    file = tmp_path / "config.json"
    file.write_text("not JSON")
    assert_refused(cluster, start(cluster, "refused", *settings), f"{tmp_path}: it has neither model.safetensors nor ")
    save_file({}, tmp_path / "model.safetensors")
    assert_refused(cluster, start(cluster, "refused", *settings), f"{tmp_path}: config.json is not JSON: ")
    file.write_text(json.dumps(TINY_DENSE | {"hidden_size": 64, "num_hidden_layers": 9}))
    made = start(cluster, "refused", *settings)
    assert_refused(cluster, made, "is of another model", "hidden_size is 64, not 96", "num_hidden_layers is 9")
    file.write_text(json.dumps(TINY_DENSE))
    made = start(cluster, "refused", *settings)
    assert_refused(cluster, made, "tensors are missing")
    model = ModelConfig(layers=2, hidden=96, heads=4, kv_heads=2, ffn_hidden=256, context=128)
    tensors = {entry.name: torch.zeros(entry.shape) for entry in entries(model, vocab_size=64)}
    save_file(tensors, tmp_path / "model.safetensors")
    made = start(cluster, "shaped", "--hold", *settings)
    cluster.run("scancel", submitted(cluster, made).number)


@pytest.mark.parametrize(
    ("words", "environment", "problems"),
    [
        pytest.param([], {}, [], marks=pytest.mark.long),
        (
            ["--partition=gpu", "--time=4", "layout=pp2", "run.save_every=-1"],
            {"NODES": "3"},
            [
                "--time=4 is 240 s, and the job is asked to stop 300 s ahead",
                "invalid partition",
                "run.save_every=-1",
                "world size 3: not divisible by",
            ],
        ),
    ],
    ids=["right", "wrong"],
)
def test_a_dry_run_names_every_problem_and_queues_nothing(cluster, words, environment, problems):
    made = start(cluster, "dry", "--dry-run", *words, **environment)
    assert made.returncode == (2 if problems else 0), made
    listed = made.stdout.partition(f"\n{len(problems)} problems:\n")[2]
    assert len(re.findall(r"^ *\d+\. ", listed, re.MULTILINE)) == len(problems), made.stdout
    assert [problem for problem in problems if problem not in listed] == []
    assert made.stdout.endswith("\nready\n") == (not problems)
    assert cluster.jobs() == []
    assert not (cluster.root / "runs" / "dry").exists()


@pytest.mark.long
def test_a_dry_run_needs_no_slurm(tmp_path):
    for name in ("bash", "dirname", "basename", "paste", "grep", "head"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    settings = [*SMALL, f"run.root={tmp_path}/runs"]
    own = {"PATH": str(tmp_path), "RANKS_PER_NODE": "1"}
    made = subprocess.run(
        ["/usr/bin/bash", REPOSITORY / "slurm" / "tiny.sh", "--dry-run", *settings],
        env=ENVIRONMENT | own,
        text=True,
        capture_output=True,
    )
    assert made.returncode == 0, made
    assert made.stdout.endswith("\nready\n")
    assert not (tmp_path / "runs").exists()


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
    (path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert_refused(cluster, start(cluster, "other"), "belongs to another experiment", "run.seed: 5 there, 0 now")
    assert sorted(entry.name for entry in path.iterdir()) == ["metrics.jsonl", "run.json"]


@pytest.mark.long
def test_a_tokenizer_that_may_be_a_program_is_warned_of(cluster, tmp_path):
    (tmp_path / "problems.jsonl").write_text('{"prompt": "1+1=?", "answer": 2}\n')
    files = [f"data.{name}_path={tmp_path}/problems.jsonl" for name in ("train", "test")]
    settings = ["data=boxed", *files, f"data.tokenizer={tmp_path}", "model.vocab_size=64"]
    made = start(cluster, "spoken_for", "--hold", *settings)
    assert f"warning: data.tokenizer={tmp_path} has no tokenizer.json; programs of its own are not run" in made.stderr
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
    assert "torchrun --nproc-per-node N -m grpo_mega.train experiment=tiny layout=ep2 base=none" in made.stderr


def test_a_queued_job_keeps_the_code_it_was_submitted_with(cluster):
    launch = submit(cluster, "held", "--hold")
    (code,) = (launch.run / "slurm").glob("code-*")
    for name in ("grpo_mega/run.py", "slurm/lib/job.sh", "configs/experiment/tiny.yaml"):
        assert (code / name).read_bytes() == (REPOSITORY / name).read_bytes()
    job = cluster.job(launch.number)
    assert job["Command"].startswith(f"{code}/slurm/tiny.sh")
    assert job["NumNodes"].split("-")[0] == "2"
    again = submit(cluster, "held", "--hold")
    assert list((again.run / "slurm").glob("code-*")) == [code], "the same code is there once"
    for number in cluster.jobs():
        cluster.run("scancel", number)
    (code / "sitecustomize.py").write_text("print('planted')")
    assert_refused(cluster, start(cluster, "held", "--hold"), f"{code} does not match the digest in its name")
    (code / "sitecustomize.py").unlink()
    (code / "slurm" / "tiny.sh").write_text("echo planted")
    assert_refused(cluster, start(cluster, "held", "--hold"), f"{code} does not match the digest in its name")


@pytest.mark.long
def test_from_within_an_allocation_a_script_submits_a_job_of_its_own(cluster):
    settings = [*SMALL, "run.name=within", f"run.root={cluster.root}/runs"]
    script = REPOSITORY / "slurm" / "tiny.sh"
    made = cluster.run("salloc", "--nodes=1", "--mem=17", script, "--hold", *settings, **ENVIRONMENT)
    launch = submitted(cluster, made)
    job = cluster.job(launch.number)
    assert (job["JobState"], job["NumNodes"].split("-")[0]) == ("PENDING", "2")
    assert job.get("MinMemoryNode") != "17M"
    cluster.run("scancel", launch.number)


def test_status_of_a_job_that_waits_says_why_and_since_when_it_may_start(cluster):
    launch = submit(cluster, "waiting", "--hold")
    for what in (launch.number, launch.run, os.path.relpath(launch.run, cluster.root)):
        made = cluster.run(REPOSITORY / "slurm" / "status.sh", what)
        assert made.returncode == 0, made.stderr
        assert made.stdout.startswith(
            f"job {launch.number} is in the queue: JobHeldUser; its start, as Slurm estimates it: "
        )
    cluster.run("scancel", launch.number)
    made = cluster.run(REPOSITORY / "slurm" / "status.sh", launch.run)
    assert made.returncode == 2
    assert "no job of it waits" in made.stderr


def test_status_of_somebody_s_run_runs_nothing_of_it_and_prints_no_escape_sequence(tmp_path):
    job = tmp_path / "run" / "slurm" / "job-1"
    attempt = job / "restart-0-attempt-1"
    attempt.mkdir(parents=True)
    (job.parent / "latest").symlink_to("job-1")
    (job.parent / "status").write_text("state=running job=1 stage=\x1b]0;title\x07 checkpoint=\u009b31m\n")
    (job / "phases-restart-0.log").write_text("3 \x1b[31mtrain \u00e4\n")
    (attempt / "environment").write_text(f"id > {tmp_path}/planted\nHOST_PYTHON={tmp_path}/program\n")
    (tmp_path / "program").write_text(f"#!/bin/sh\nid > {tmp_path}/planted\n")
    (tmp_path / "program").chmod(0o755)
    (attempt / "rank-0000.log").write_text("step 1/2: \x1b[2J done\n")
    made = subprocess.run(
        [REPOSITORY / "slurm" / "status.sh", tmp_path / "run"], capture_output=True, timeout=limit(120)
    )
    assert not (tmp_path / "planted").exists()
    assert "step 1/2: ?[2J done" in made.stdout.decode()
    assert "train \u00e4" in made.stdout.decode()
    assert not set(made.stdout) & {0x1B, 0x07}
    assert b"\xc2\x9b" not in made.stdout


def test_status_of_what_has_not_started_says_so(cluster):
    made = cluster.run(REPOSITORY / "slurm" / "status.sh", "999")
    assert made.returncode == 2
    assert re.match(r"error: Slurm knows no job 999", made.stderr)
    made = cluster.run(REPOSITORY / "slurm" / "status.sh", cluster.root)
    assert made.returncode == 2
    assert "has no slurm/status" in made.stderr
