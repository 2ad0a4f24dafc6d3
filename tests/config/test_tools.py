"""The tools refuse settings as training does: one line that names the setting, exit code 2, no traceback."""

from __future__ import annotations

import pytest
from forks import run_python

OUT_OF_RANGE = "algorithm.group_size=0: out of range; choose a value in [1, inf)"
FOREIGN = ("Traceback", "full_key", "Lexer", "hydra.cc")


@pytest.mark.parametrize(
    ("tool", "settings", "said"),
    [
        ("plan.py", ["model.foo=1"], "error: model.foo: not a setting"),
        ("plan.py", ["layout=5"], "error: layout=5: no such option; choose one of"),
        ("plan.py", ["algorithm.group_size=0"], f"  - {OUT_OF_RANGE}"),
        ("parity.py", ["model.foo=1"], "error: model.foo: not a setting"),
        ("bench_host.py", ["layout=5"], "error: layout=5: no such option; choose one of"),
        ("bench_step.py", ["layout=5"], "error: layout=5: no such option; choose one of"),
        (
            "bench_weight_sync.py",
            ["algorithm.group_size=0"],
            "  - algorithm.group_size=0: out of range; choose a value in [1, inf)",
        ),
    ],
)
def test_wrong_settings_are_refused(tool: str, settings: list[str], said: str) -> None:
    experiment = {"plan.py": ["tiny"], "bench_weight_sync.py": ["experiment=tiny"]}.get(tool, [])
    done = run_python(f"tools/{tool}", *experiment, *settings)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert [word for word in FOREIGN if word in done.stderr] == []


@pytest.mark.long
def test_under_torchrun_one_rank_says_it() -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run_python(*torchrun, "tools/bench_step.py", "layout=ep2")
    assert done.returncode != 0
    assert done.stderr.count("error: the configuration cannot run") == 1
    assert "layout.ep=2: needs experts" in done.stderr


def test_the_planner_speaks_of_the_machines_that_were_given() -> None:
    done = run_python("tools/plan.py", "tiny", "layout=tp2_pp2", "cluster.nodes=1", "cluster.gpus_per_node=1")
    assert done.returncode == 2
    assert "cluster.nodes=1 * cluster.gpus_per_node=1 = 1: not divisible by layout.tp=2" in done.stderr
    assert "start 4 processes, or choose layout=single" in done.stderr


def test_a_planner_without_its_experiment_asks_for_that_alone() -> None:
    done = run_python("tools/plan.py", "--propose")
    assert done.returncode == 2
    assert done.stderr.endswith("the following arguments are required: experiment\n")
