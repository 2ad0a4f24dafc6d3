"""SGLang on a GPU that it shares with the trainer: weights by CUDA IPC, memory that is seen to come back, a run."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import results, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None, reason="SGLang is not installed: pip install sglang"
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("pynvml") is None, reason="NVML is not installed: pip install nvidia-ml-py"
    ),
]
TESTS = Path(__file__).resolve().parents[1]
JOB = TESTS / "gpu" / "gpu_sglang_job.py"
GIB = 1024
"""In the ledger's MiB."""


def checks(*files: Path) -> list[str]:
    """By name: importing the files would prepare the platform here."""
    nodes = [node for file in files for node in ast.parse(file.read_text()).body]
    functions = [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
    return [name.removeprefix("check_") for name in functions if name.startswith("check_")]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return results(run_ranks(JOB, 1, [str(tmp_path_factory.mktemp("gpu_contract"))], timeout=1800))


@pytest.mark.parametrize(
    "check", checks(TESTS / "rollout" / "engine_contract.py", JOB, TESTS / "sglang" / "sglang_contract_job.py")
)
def test_contract(found: dict[str, str], check: str) -> None:
    assert not found[check], found[check]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Eight steps with turns; the engine is killed in the third."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS / "sglang"), prepend=":")
        job = TESTS / "sglang" / "grpo_job.py"
        return results(run_ranks(job, 1, [str(tmp_path_factory.mktemp("gpu_grpo")), "sglang"], timeout=1800))


def lines(run: dict[str, Any], phase: str) -> list[dict[str, float]]:
    """{holder: MiB} each time that the phase is in the ledger."""
    header, *rows = (line.removeprefix("MiB").split() for line in run["colocation"]["memory"])
    numbers = [row[-len(header) :] for row in rows if " ".join(row[: -len(header)]) == phase]
    return [dict(zip(header, (float(n.replace(",", "")) for n in row), strict=True)) for row in numbers]


def test_the_trainer_leaves_and_comes_back(run: dict[str, Any]) -> None:
    """Its optimizer, gradients and reference first, then its weights; more than 3 GiB in all, and hardly any stays."""
    before, after = lines(run, "trainer's turn ends"), lines(run, "trainer leaves: end")
    assert len(after) == 2 * len(before) > 0
    for held, left in zip(before, after[1::2], strict=True):
        assert held["allocated"] - left["allocated"] > 3 * GIB
        assert left["reserved"] < GIB / 2


def test_the_engine_leaves(run: dict[str, Any]) -> None:
    ends, rest = lines(run, "engine's turn ends"), lines(run, "engine has left")
    assert rest
    assert min(line["engine"] for line in ends) - max(line["engine"] for line in rest) > 3 * GIB


def test_training_goes_on_as_if_it_had_never_left(run: dict[str, Any]) -> None:
    metrics = run["metrics"]
    assert [step["step"] for step in metrics] == [*range(1, 9)]
    assert metrics[-1]["reward/mean"] > metrics[0]["reward/mean"]
    compared = [step["mismatch/mean_abs"] for step in metrics if "mismatch/mean_abs" in step]
    assert compared
    assert max(compared) < 0.05


def test_the_engine_was_killed_and_started_anew(run: dict[str, Any]) -> None:
    assert any("died" in warning for warning in run["warnings"])
    assert run["colocation"]["state"] == "training"
    assert not [name for name in run["left"] if "sglang.host" in name or "sglang::" in name]
