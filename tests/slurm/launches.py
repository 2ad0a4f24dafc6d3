"""Submits the scripts of slurm/ as a user does, to a cluster of tests, and knows where their runs lie."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from cluster import Cluster, wait_until
from metric_lines import of_steps
from slurm_rewards import FAULT

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
SMALL = [
    "base=none",
    "data.validation_size=8",
    "data.test_size=8",
    "algorithm.prompts_per_step=8",
    "algorithm.group_size=4",
    "rollout.max_new_tokens=16",
    "reward.terms=[{name:accuracy},{name:own,function:slurm_rewards:disturbed}]",
    "reward.timeout_seconds=3600",  # a reward may hold a step until Slurm's own clock strikes
    "run.steps=4",
    "run.save_every=1",
    "run.eval_every=0",
    "run.tensorboard=false",
]
"""Four steps of a second or less, from random weights."""
ENVIRONMENT = {
    "PYTHON": sys.executable,
    "HOST_PYTHON": sys.executable,
    "PYTHONPATH": str(HERE),
    "OMP_NUM_THREADS": "1",
    "RANKS_PER_NODE": "1",
    "POLL_SECONDS": "1",
}


@dataclass(frozen=True)
class Launch:
    """A submitted script."""

    cluster: Cluster
    number: int
    run: Path

    @property
    def log(self) -> str:
        """What the job printed, over all its starts."""
        file = self.run / "slurm" / f"job-{self.number}.log"
        return file.read_text() if file.exists() else ""

    @property
    def files(self) -> Path:
        """The job's folder."""
        return self.run / "slurm" / f"job-{self.number}"

    @property
    def status(self) -> dict[str, str]:
        """The fields of the status line."""
        return dict(word.split("=", 1) for word in (self.run / "slurm" / "status").read_text().split())

    def steps(self) -> list[int]:
        """The training steps in metrics.jsonl."""
        return [line["step"] for line in of_steps(self.run)]

    def finish(self) -> str:
        """Waits for the end of the job and of its processes; Slurm's word for how it ended."""
        state = self.cluster.wait(self.number)["JobState"]
        wait_until(lambda: not self.cluster.processes(), f"orphans: {self.cluster.processes()}")
        return state


def start(
    cluster: Cluster, name: str, *arguments: str, fault: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs slurm/tiny.sh by hand, as a user would, for a run called `name`."""
    settings = [*SMALL, f"run.name={name}", f"run.root={cluster.root}/runs", *arguments]
    return cluster.run(REPOSITORY / "slurm" / "tiny.sh", *settings, **_environment(fault, environment))


def submit(cluster: Cluster, name: str, *arguments: str, fault: str = "", **environment: str) -> Launch:
    """Submits slurm/tiny.sh by running it."""
    return submitted(cluster, start(cluster, name, *arguments, fault=fault, **environment))


def submitted(cluster: Cluster, made: subprocess.CompletedProcess[str]) -> Launch:
    """What a script of slurm/ has submitted."""
    assert made.returncode == 0, made.stderr
    found = re.search(r"Submitted batch job (\d+)\nrun directory (\S+);", made.stdout)
    assert found, made.stdout
    return Launch(cluster, int(found[1]), Path(found[2]))


def submit_as_it_is(cluster: Cluster, name: str, *arguments: str, fault: str = "", **environment: str) -> Launch:
    """Gives slurm/tiny.sh to sbatch, from the repository."""
    run = cluster.root / "runs" / name
    (run / "slurm").mkdir(parents=True)
    command = ["sbatch", "--parsable", f"--output={run}/slurm/job-%j.log", "slurm/tiny.sh"]
    settings = [*SMALL, f"run.name={name}", f"run.root={cluster.root}/runs", *arguments]
    made = cluster.run(*command, *settings, cwd=REPOSITORY, **_environment(fault, environment))
    assert made.returncode == 0, made.stderr
    return Launch(cluster, int(made.stdout), run)


def _environment(fault: str, more: dict[str, str]) -> dict[str, str]:
    return ENVIRONMENT | more | ({FAULT: fault} if fault else {})
