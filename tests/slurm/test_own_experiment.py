"""The Slurm script that `python -m grpo_mega.new --cluster` writes runs what it is for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launches import ENVIRONMENT, submitted

sys.path.insert(0, str(Path(__file__).parents[1] / "new"))

from own_clone import Clone

ON_CPUS = [
    *("cluster=any", "cluster.nodes=null", "rollout.engine=embedded"),
    *("optimizer.overlap=false", "optimizer.distributed=false"),
]
SHORT = ["run.steps=1", "run.eval_every=0", "algorithm.prompts_per_step=4", "algorithm.group_size=2"]


@pytest.mark.long
def test_an_experiment_of_ones_own_is_submitted_by_its_script(cluster):
    """The script asks for GPUs, which these nodes do not have: a word of the user's is above it."""
    clone = Clone(cluster.root / "clone")
    clone.new("own", "--cluster", "h100", "--completion-tokens", "32", "--reward", "my_rewards:score")
    script, environment = clone.root / "slurm" / "own.sh", ENVIRONMENT | {"RANKS_PER_NODE": "2"}
    refused = cluster.run(script, *ON_CPUS, *SHORT, cwd=clone.root, **environment)
    assert refused.returncode == 2
    assert "Slurm would not take this job" in refused.stderr
    environment |= {"PYTHONPATH": str(clone.root)}  # where the reward is
    made = cluster.run(script, "--gpus-per-node=0", *ON_CPUS, *SHORT, cwd=clone.root, **environment)
    launch = submitted(cluster, made)
    assert cluster.job(launch.number)["JobName"] == "own"
    assert launch.finish() == "COMPLETED", launch.log
    assert launch.steps() == [1]
    assert launch.run == clone.root / "runs" / "own"
    assert (launch.run / "export" / "step-000001" / "config.json").is_file()
