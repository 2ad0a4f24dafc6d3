"""Every tool in tools/ explains itself, is run by a test, and has the options that documents give it."""

from __future__ import annotations

import re
from functools import cache

import pytest
from documents import CHECKED, code
from forks import run_python
from ranks import REPOSITORY
from test_commands import IN_MAKE_TEST_RUN

TOOLS = sorted(path.name for path in (REPOSITORY / "tools").glob("*.py"))
RUN_BY = {
    "bench_host.py": "tests/stages/test_bench_host.py",
    "bench_sandbox.py": "tests/judges/sandbox/test_bench_sandbox.py",
    "countdown.py": "tests/reward/test_countdown.py",
    "data.py": "tests/recipes/test_data_tool.py",
    "gpu_smoke.py": "tests/forecast/doctor/test_gpu_smoke.py",
    "bench_step.py": "tests/stages/test_bench_step.py",
    "evaluate.py": "tests/evaluating.py",
    "recipe.py": "tests/recipes/test_walk.py",
    "report.py": "tests/show/report/test_report_tool.py",
    "trace.py": "tests/show/traces/test_trace_tool.py",
    "rejection_sample.py": "tests/recipes/test_rejection_sampling.py",
    "export.py": "tests/train/exporting.py",
    "import.py": "tests/train/test_import.py",
    "plan.py": "tests/forecast/planning/test_plan.py",
    "simulate.py": "tests/forecast/planning/test_simulated_slices.py",
    "rehearse.py": "tests/forecast/rehearsal/test_rehearsed_ranks.py",
    "bench_weight_sync.py": "tests/colocation/test_bench_weight_sync.py",
    "bench_kernels.py": "tests/kernels/test_bench_kernels.py",
    "parity.py": "tests/parity/test_parity_tool.py",
}
"""Tests of `make test` that run those which no document's command runs there."""
PARTS = {
    "attention_contenders.py": "bench_kernels.py",
    "gpu_smoke_steps.py": "gpu_smoke.py",
    "kernel_check.py": "bench_kernels.py",
    "kernel_contenders.py": "bench_kernels.py",
}
"""What is no tool, but a part of one."""
NOT_RUN = {
    "bench_trl.py": "TRL has an environment of its own",
    "rehearse_rank.py": "tools/rehearse.py starts it in an environment of its own",
}
OTHERS = {
    "Slurm": "account container-image container-save gpus-per-node no-kill no-requeue nodes ntasks-per-node partition"
    " signal time",
    "torchrun": "master-port nproc-per-node standalone",
    "pip": "no-build-isolation",
    "what else installs and checks": "clear local-dir part repo-type tool",
}
"""Options that are not ours."""


@cache
def helped(tool: str) -> str:
    """What `--help` prints, of a tool or of training."""
    words = [f"tools/{tool}"] if tool in TOOLS else ["-m", tool]
    done = run_python(*words, "--help", *(["all"] if tool == "grpo_mega.train" else []))
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("tool", [tool for tool in TOOLS if tool not in PARTS.keys() | NOT_RUN.keys()])
def test_help_is_its_docstring_and_its_options(tool: str) -> None:
    first = (REPOSITORY / "tools" / tool).read_text().split('"""')[1].splitlines()[0]
    assert first in helped(tool)
    assert "--help" in helped(tool)


def test_a_test_runs_each() -> None:
    for part, tool in PARTS.items():
        assert f"from {part.removesuffix('.py')} import" in (REPOSITORY / "tools" / tool).read_text()
    for tool, test in RUN_BY.items():
        assert tool in (REPOSITORY / test).read_text()
    by_document = {
        tool for tool in TOOLS for command in IN_MAKE_TEST_RUN if command and f"tools/{tool}" in command.text
    }
    assert sorted(by_document | RUN_BY.keys() | PARTS.keys() | NOT_RUN.keys()) == TOOLS


def options_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--([a-z][\w-]*)", text))


def known_of(tool: str) -> set[str]:
    """The options of a tool, or of training; of one whose libraries are not here, those in its source."""
    return options_in((REPOSITORY / "tools" / tool).read_text() if tool in NOT_RUN else helped(tool))


def test_documented_options_exist() -> None:
    """After a tool's name they are the tool's own; elsewhere those of some tool, or of a program that is not ours."""
    modules = ["grpo_mega.train", "grpo_mega.new", "grpo_mega.show.trackers.follow"]
    ours = [tool for tool in [*TOOLS, *modules] if tool not in PARTS]
    anywhere = options_in((REPOSITORY / "tests" / "parity" / "report.py").read_text())
    anywhere = anywhere.union(*map(known_of, ours), *(options.split() for options in OTHERS.values()))
    lines = [(f"{path.name}:{number}", text) for path in CHECKED for number, text in code(path)]
    for tool in TOOLS:
        lines += [(tool, line) for line in (REPOSITORY / "tools" / tool).read_text().split('"""')[1].splitlines()]
    unknown, seen = [], set()
    for where, text in lines:
        before, *named = re.split(
            r"(?:tools/|-m )(\w+\.py|grpo_mega\.(?:train|new|show\.trackers\.follow))", text, maxsplit=1
        )
        seen |= options_in(text)
        unknown += [f"{where}: --{option}" for option in options_in(before) - anywhere]
        if named:
            tool, after = named
            unknown += [f"{where}: {tool} --{option}" for option in options_in(after) - known_of(tool)]
    assert not unknown, unknown
    assert not set(" ".join(OTHERS.values()).split()) - seen, "nobody names these any more"


@pytest.mark.parametrize(
    ("former", "today"),
    [("observe.status", "show.status"), ("observe.follow", "show.trackers.follow")],
)
def test_commands_have_their_former_names_too(former: str, today: str) -> None:
    assert re.sub(r"usage: \S+", "usage:", helped(f"grpo_mega.{former}")) == re.sub(
        r"usage: \S+", "usage:", helped(f"grpo_mega.{today}")
    )
