"""A recipe as one job: it walks from stage to stage, survives what a run survives, and comes to the same numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import Cluster, wait_until
from launches import ENVIRONMENT, REPOSITORY, SMALL, Launch, submitted
from metric_lines import repeated
from pools import write_pool

RIGHT = ("1+2=3", 5, "stop", 1.0, 1.0)
WRONG = ("4", 1, "stop", 0.0, 1.0)
CHOOSING = (
    "stages: {pool: {samples: runs/none --train 2}, data: {choose: '{pool}'}, few: {choose: '{pool} --longest 9'}}"
)
RUNS = """
processes: 2
stages:
  base:
    run: experiment=tiny layout=single {small} run.steps=1
  zero:
    run: experiment=tiny layout=single {small} run.init_from={{base}} run.steps=3
  pool:
    samples: "{{zero}} --train 8 --samples 4"
  data:
    choose: "{{pool}} --keep accuracy>=0"
  learned:
    processes: 1
    run: experiment=tiny layout=single {small} run.init_from={{base}} sft.path={{data}} sft.steps=3 sft.warmup_steps=0
      run.steps=0
"""


def recipe(cluster: Cluster, name: str, text: str) -> Path:
    """A recipe's file; its products lie in a folder of its name, beside it."""
    file = cluster.root / f"{name}.yaml"
    file.write_text(text)
    return file


def environment(file: Path, **more: str) -> dict[str, str]:
    return ENVIRONMENT | {"RECIPE": str(file), "RECIPE_ROOT": str(file.with_suffix(""))} | more


def start(cluster: Cluster, file: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return cluster.run(REPOSITORY / "slurm" / "r1_tiny.sh", *words, **environment(file, **more))


def submit(cluster: Cluster, file: Path, *words: str, **more: str) -> Launch:
    return submitted(cluster, start(cluster, file, *words, **more))


def tool(file: Path, what: str, *words: object) -> str:
    """What tools/recipe.py prints."""
    command = [sys.executable, REPOSITORY / "tools" / "recipe.py", what, file, *words, "--root", file.with_suffix("")]
    path = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "tests" / "slurm")))
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*map(str, command)], env=os.environ | own, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_what_was_put_in_its_place_by_hand_is_used_and_a_refusal_names_its_stage(cluster: Cluster) -> None:
    file = recipe(cluster, "chosen", CHOOSING)
    write_pool(cluster.root / "wrong", {"1+2=?": [WRONG]})
    write_pool(cluster.root / "right", {"1+2=?": [RIGHT, WRONG]})
    tool(file, "replace", "pool", cluster.root / "wrong")
    launch = submit(cluster, file, NODES="1")
    assert launch.run == file.with_suffix("")
    assert launch.finish() == "FAILED"
    assert cluster.job(launch.number)["ExitCode"] == "2:0", launch.log
    assert f"stage data of the recipe {file} cannot run" in launch.log
    assert "no sample passes" in launch.log
    assert (launch.status["state"], launch.status["stage"]) == ("refused", "data")

    tool(file, "replace", "pool", cluster.root / "right")
    launch = submit(cluster, file, NODES="1")
    assert launch.finish() == "COMPLETED", launch.log
    assert [json.loads(line)["completion"] for line in (launch.run / "data.jsonl").read_text().splitlines()] == [
        "1+2=3"
    ]
    assert "3 of 3 stages are done" in tool(file, "status")
    assert launch.status["state"] == "completed"
    shown = cluster.run(REPOSITORY / "slurm" / "status.sh", launch.run).stdout
    assert "3 of 3 stages are done" in shown
    assert "few" in shown


@pytest.mark.long
def test_a_dry_run_names_the_problems_of_all_stages(cluster: Cluster) -> None:
    text = RUNS.format(small="run.stps=1").replace("--train 8", "--data absent.jsonl")
    text = text.replace("--keep accuracy>=0", "--also=gone.jsonl --keep accuracy>=0")
    made = start(cluster, recipe(cluster, "dry", text), "--dry-run", "--time=4", NODES="4", RANKS_PER_NODE="2")
    assert made.returncode == 2
    listed = made.stdout.partition("\n7 problems:\n")[2]
    expected = ["--time=4 is 240 s", "no stage has more than 2 processes", "set NODES=1", "absent.jsonl does not exist"]
    expected += ["--also gone.jsonl does not exist"]
    expected += [f"stage {name}: " for name in ("base", "zero", "learned")]
    assert [problem for problem in expected if problem not in listed] == [], made
    assert cluster.jobs() == []
    assert not (cluster.root / "dry").exists()
    made = start(
        cluster, recipe(cluster, "dry", RUNS.format(small="base=none")), "--dry-run", NODES="2", RANKS_PER_NODE="1"
    )
    assert made.stdout.endswith("\nready\n"), made
    text = RUNS.format(small="base=none").replace("--train 8", "--train 8 layout.ep=4")
    made = start(cluster, recipe(cluster, "dry", text), "--dry-run", NODES="2", RANKS_PER_NODE="1")
    listed = made.stdout.partition("\n1 problem:\n")[2]
    assert listed.startswith("  1. stage pool: the configuration cannot run:"), made
    assert "layout.ep=4: with layout.etp=1 a pipeline stage needs 4 processes, or a multiple; it has 2" in listed


@pytest.mark.long
def test_a_chain_that_is_stopped_ends_with_the_numbers_of_one_that_is_not(cluster: Cluster) -> None:
    """One on a single machine without Slurm; one is asked to stop in a run and as a pool begins."""
    small = " ".join(f'"{word}"' for word in SMALL)
    whole, broken = (recipe(cluster, name, RUNS.format(small=small)) for name in ("whole", "broken"))
    tool(whole, "run")
    held = cluster.root / "held"
    launch = submit(cluster, broken, GRPO_MEGA_TEST_FAULT=f"hold 1 0 {held}")
    root = launch.run
    for place in (held, root / "pool" / "settings.json"):
        wait_until(lambda place=place: place.exists() or launch.number not in cluster.jobs(), f"{place} does not come")
        cluster.run("scancel", "--batch", "--signal=USR1", launch.number)
    assert launch.finish() == "COMPLETED", launch.log
    assert cluster.job(launch.number)["Restarts"] == "2", launch.log
    assert "stage learned on 1 nodes with 1 ranks" in launch.log
    assert "stage zero on 2 nodes with 1 ranks" in launch.log
    assert "5 of 5 stages are done" in tool(broken, "status")
    for name in ("zero/metrics.jsonl", "learned/sft.jsonl"):
        assert numbers(root / name) == numbers(whole.with_suffix("") / name)
    rows = [[json.loads(line) | {"pool": ""} for line in (folder / "data.jsonl").read_text().splitlines()]
            for folder in (root, whole.with_suffix(""))]  # fmt: skip
    assert rows[0] == rows[1]
    assert rows[0]


def numbers(file: Path) -> list[dict[str, object]]:
    """The lines of a file of metrics that are the same when it is repeated."""
    return [repeated(json.loads(line)) for line in file.read_text().splitlines()]
