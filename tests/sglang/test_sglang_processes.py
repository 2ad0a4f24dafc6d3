"""Two ranks, an engine each: what signals, kills and errors do to a run, and that no process outlives it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from train_jobs import Ended, Job, numbers, wait_until

HERE = Path(__file__).resolve().parent
FOREVER = 10**6
RUN = [
    "experiment=tiny_sglang",
    "base=none",
    "layout=single",
    "data.validation_size=8",
    "data.test_size=8",
    "algorithm.prompts_per_step=4",
    "algorithm.group_size=4",
    "rollout.max_new_tokens=12",
    "run.tensorboard=false",
    "run.eval_every=0",
    "run.save_every=0",
    "reward.success=own",
]


def start(root: Path, name: str, function: str, steps: int, *more: str) -> Job:
    """A run under torchrun that finds the stand-ins of this folder, as pytest did, and its rewards."""
    path = os.pathsep.join([str(HERE), os.environ["PYTHONPATH"]])
    reward = f"reward.terms=[{{name:own,function:sglang_rewards:{function}}}]"
    overrides = [*RUN, reward, f"run.name={name}", f"run.steps={steps}", *more]
    return Job(root, overrides, ranks=2, environment={"PYTHONPATH": path}, cold=True)


def ranks(job: Job) -> list[psutil.Process]:
    """The trainer's own processes."""
    children = psutil.Process(job.process.pid).children()
    return [p for p in children if "grpo_mega.train" in p.cmdline()]


def steps_done(root: Path, name: str) -> int:
    file = root / "runs" / name / "metrics.jsonl"
    return len(numbers(file.parent)) if file.exists() else 0


def wait_for_step(root: Path, name: str, job: Job, step: int) -> None:
    wait_until(lambda: steps_done(root, name) >= step or job.process.poll() is not None, f"no step {step}", pause=0.2)
    assert job.process.poll() is None, job.finish()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def stopped(root: Path) -> Ended:
    """Every rank got SIGTERM after two steps, for which each had sent its engine the weights."""
    job = start(root, "stopped", "sevens", FOREVER, "rollout.sglang.transport=network")
    wait_for_step(root, "stopped", job, 2)
    for rank in ranks(job):
        rank.send_signal(signal.SIGTERM)
    return job.finish()


def test_a_signal_stops_the_run_and_its_engines(stopped: Ended) -> None:
    assert "is saved" in stopped.stderr
    assert not stopped.orphans


def test_the_stopped_run_is_continued_and_completed(root: Path, stopped: Ended) -> None:
    done = steps_done(root, "stopped")
    assert done >= 2
    ended = start(root, "stopped", "sevens", done + 2, "rollout.sglang.transport=disk").finish()
    assert ended.code == 0, ended
    assert not ended.orphans
    metrics = numbers(root / "runs" / "stopped")
    assert [line["step"] for line in metrics] == [*range(1, done + 3)]
    assert all(line.get("mismatch/max_abs", 0) < 1e-4 for line in metrics)
    assert len([*(root / "runs" / "stopped" / "engine-weights").iterdir()]) == 1, "what both engines read last"
    assert json.loads((root / "runs" / "stopped" / "summary.json").read_text())["status"] == "completed"


def test_engines_end_with_a_trainer_that_was_killed(root: Path) -> None:
    job = start(root, "killed", "sevens", FOREVER)
    wait_for_step(root, "killed", job, 1)
    for rank in ranks(job):
        rank.kill()
    ended = job.finish()
    assert ended.code != 0
    assert not ended.orphans


def test_an_engine_that_is_lost_for_good_leaves_a_post_mortem_on_every_rank(root: Path) -> None:
    job = start(root, "lost", "sevens", FOREVER, "rollout.sglang.restarts=0")
    wait_for_step(root, "lost", job, 1)
    children = [child for rank in ranks(job) for child in rank.children(recursive=True)]
    next(child for child in children if "sglang::scheduler" in " ".join(child.cmdline())).kill()
    ended = job.finish()
    assert ended.code != 0
    assert not ended.orphans
    for rank in (0, 1):
        file = root / "runs" / "lost" / "logs" / f"post_mortem-rank-{rank}.json"
        found = json.loads(file.read_text())
        assert "lost more than rollout.sglang.restarts=0 times" in found["error"]
        assert found["owner"] == "engine"
        assert any(line.startswith("trainer's turn ends") for line in found["memory"])
        assert str(file.relative_to(root)) in ended.stderr


def test_engines_end_with_a_trainer_that_fails(root: Path) -> None:
    ended = start(root, "failing", "broken", FOREVER).finish()
    assert ended.code != 0
    assert "this reward is broken" in ended.stderr
    assert not ended.orphans
