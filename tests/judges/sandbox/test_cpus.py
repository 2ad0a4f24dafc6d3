"""How many programs run at once: by the CPUs that a rank may use, however it is kept from the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import REPOSITORY

from grpo_mega.judges.sandbox import Sandbox
from grpo_mega.judges.sandbox.cpus import quota, share, share_of_cpus


def test_ranks_of_a_machine_share_its_cpus(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    def boxes(ranks: str) -> int:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        return Sandbox(mechanism=sandbox.mechanism).boxes

    assert boxes("1") == share_of_cpus()
    assert boxes(str(os.cpu_count())) == 1
    assert boxes("1000") == 1
    assert Sandbox(boxes=7, mechanism=sandbox.mechanism).boxes == 7


@given(together=st.floats(0.1, 600), bound=st.integers(1, 512), ranks=st.integers(1, 64))
def test_ranks_never_have_more_cpus_together_than_they_may_use(together: float, bound: int, ranks: int) -> None:
    of_one = share(together, ranks, bound)
    assert 1 <= of_one <= bound
    assert of_one == 1 or of_one * ranks <= together
    assert of_one == bound or (of_one + 1) * ranks > together


def test_a_rank_that_is_bound_to_cpus_of_its_own_has_all_of_them() -> None:
    """They are not shared once more: the others are bound to theirs."""
    script = """
import os
from grpo_mega.judges.sandbox import cpus
before = os.sched_getaffinity(0)
os.sched_setaffinity(0, [min(before)])
assert cpus._cpus_of_cpuset() >= len(before)
assert os.sched_getaffinity(0) == {min(before)}
print(cpus.share_of_cpus())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert done.stdout == "1\n"


def write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


@pytest.mark.parametrize(
    ("groups", "files", "cpus_of_quota"),
    [
        ("0::/a/b\n", {"a/cpu.max": "350000 100000\n", "a/b/cpu.max": "max 100000\n"}, 3.5),
        (
            "0::/a/b\n",
            {"cpu.max": "max 100000\n", "a/cpu.max": "800000 100000\n", "a/b/cpu.max": "50000 100000\n"},
            0.5,
        ),
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2.0),
        ("0::/kubepods/pod/name\n", {"cpu.max": "200000 100000\n"}, 2.0),
        ("0::/a\n", {"a/cpu.weight": "100\n"}, float("inf")),
        ("0::/a\n", {"b/cpu.max": "100000 100000\n"}, float("inf")),
        (
            "4:memory:/a\n3:cpu,cpuacct:/a\n0::/\n",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "150000\n", "cpu,cpuacct/a/cpu.cfs_period_us": "50000\n"},
            3.0,
        ),
        (
            "3:cpuset:/a\n1:cpu:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n", "cpuset/a/cpuset.cpus": "0-3\n"},
            float("inf"),
        ),
    ],
)
def test_the_least_quota_of_all_groups_counts(
    tmp_path: Path, groups: str, files: dict[str, str], cpus_of_quota: float
) -> None:
    """As the kernel shows them: version 2 and 1, nested, and a container's group under no name."""
    write(tmp_path, {"proc": groups} | {f"sys/{name}": content for name, content in files.items()})
    assert quota(tmp_path / "proc", tmp_path / "sys") == cpus_of_quota


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert quota(tmp_path / "proc", tmp_path / "sys") == float("inf")
