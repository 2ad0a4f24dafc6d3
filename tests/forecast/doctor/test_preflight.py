"""Nodes that differ from the others, or lack something, are told apart; the checks themselves run as on a cluster."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_mega.forecast.doctor import preflight

SCRIPT = Path(preflight.__file__)


def check(
    folder: Path, node: str, *options: str, token: str = "12", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs the checks as a node does."""
    command = [sys.executable, "-P", SCRIPT, "check", "--folder", folder, "--token", token, *options]
    return subprocess.run(command, env={"SLURMD_NODENAME": node} | environment, text=True, capture_output=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four nodes were checked; the token was written before."""
    (tmp_path / "token").write_text("12\n")
    assert check(tmp_path, "a", "--free-mb", "1").returncode == 0
    for node in "bcd":
        (tmp_path / f"{node}.json").write_text((tmp_path / "a.json").read_text())
    return tmp_path


def change(folder: Path, node: str, **fields: object) -> None:
    file = folder / f"{node}.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def verdicts(folder: Path, nodes: str = "abcd") -> dict[str, str]:
    return preflight.judge(folder, list(nodes), seconds=10)


def test_healthy_nodes_are_fit(folder):
    assert verdicts(folder) == dict.fromkeys("abcd", "ok")


def test_the_command_line_prints_a_line_per_node(folder):
    command = [sys.executable, "-P", SCRIPT, "judge", "--folder", folder, "--nodes", "a", "x"]
    assert subprocess.run(command, text=True, capture_output=True).stdout == "a ok\nx silent\n"


def test_a_node_that_left_nothing_or_half_a_file_is_silent(folder):
    (folder / "b.json").write_text('{"node": "b", "prob')
    assert verdicts(folder, "abx") == {"a": "ok", "b": "silent", "x": "silent"}


def test_another_file_system_under_the_same_name_is_noticed(folder):
    check(folder, "a", token="13")
    assert "another file system" in verdicts(folder)["a"]


def test_a_disk_without_room_is_named(folder):
    check(folder, "a", "--free-mb", str(1 << 40))
    assert f"{folder} has" in verdicts(folder)["a"]
    assert "make room" in verdicts(folder)["a"]


def test_what_the_run_reads_must_be_readable_here(folder):
    check(folder, "a", "--free-mb", "1", "--reads", str(SCRIPT), str(folder), "/absent/data")
    assert verdicts(folder)["a"] == "unfit: /absent/data cannot be read: is its file system mounted?"


def test_an_interface_that_is_not_there_is_named_with_those_that_are(folder):
    check(folder, "a", "--free-mb", "1", "--interface", "lo")
    assert verdicts(folder)["a"] == "ok"
    check(folder, "a", "--free-mb", "1", "--interface", "absent0")
    assert verdicts(folder)["a"].startswith("unfit: INTERFACE=absent0 is none of: ")
    assert "lo" in verdicts(folder)["a"]


def test_memory_that_comes_back_late_is_waited_for_and_not_for_ever():
    left = [3, 1, 0]
    preflight.settled(lambda: left.pop(0) * preflight.FOREIGN_MEMORY, patience=60)
    assert left == [0]
    preflight.settled(lambda: 2 * preflight.FOREIGN_MEMORY, patience=0)


def test_a_folder_that_cannot_be_written_is_an_error_that_names_the_node(folder):
    made = check(folder / "absent", "a")
    assert made.returncode == 1
    assert made.stderr.startswith(f"a: {folder}/absent cannot be written")


def test_missing_gpus_are_named_without_a_traceback(folder):
    made = check(folder, "a", "--gpus", "8", "--free-mb", "1")
    assert (made.returncode, made.stderr) == (0, "")
    assert verdicts(folder)["a"].startswith("unfit: ")


LOST = """
class NVMLError_GpuIsLost(Exception):
    pass

def nvmlInit():
    pass

def nvmlDeviceGetCount():
    raise NVMLError_GpuIsLost("GPU is lost")
"""


def test_a_gpu_that_is_lost_makes_its_node_unfit_and_not_silent(folder):
    (folder / "pynvml.py").write_text(LOST)
    made = check(folder, "a", "--gpus", "8", "--free-mb", "1", PYTHONPATH=str(folder))
    assert (made.returncode, made.stderr) == (0, "")
    assert "its GPUs fail (NVMLError_GpuIsLost: GPU is lost)" in verdicts(folder)["a"]


class PlantedNVML(SimpleNamespace):
    """What NVML says of two GPUs, of which the second, or the driver, has one fault."""

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0

    class NVMLError_NotSupported(Exception):
        """Raised for memory without error correction."""

    def __init__(self, fault: str) -> None:
        def of_second(name: str, healthy: object, sick: object) -> Callable[..., object]:
            return lambda number, *_: sick if (fault, number) == (name, 1) else healthy

        def errors(number: int, *_: object) -> int:
            if fault == "no ECC":
                raise self.NVMLError_NotSupported
            return 7 * (fault == "errors" and number == 1)

        super().__init__(
            nvmlInit=lambda: None,
            nvmlSystemGetDriverVersion=lambda: "580.1",
            nvmlDeviceGetCount=lambda: 1 if fault == "count" else 2,
            nvmlDeviceGetHandleByIndex=lambda number: number,
            nvmlDeviceGetName=lambda number: "NVIDIA H100",
            nvmlDeviceGetMemoryInfo=of_second("memory", SimpleNamespace(used=1 << 30), SimpleNamespace(used=3 << 30)),
            nvmlDeviceGetTotalEccErrors=errors,
            nvmlDeviceGetRemappedRows=of_second(fault, (2, 0, 0, 0), (2, 0, fault == "pending", fault == "failed")),
            nvmlDeviceGetCurrentClocksThrottleReasons=of_second("heat", 0x4, 0x4 | 0x40),
        )


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("none", ""),
        ("no ECC", ""),
        ("count", "1 GPUs instead of 2"),
        ("memory", "GPU 1: 3072 MiB are in use before the job starts: end the processes that hold it"),
        ("errors", "GPU 1: 7 uncorrected memory errors since the driver started: reset or replace it"),
        ("pending", "GPU 1: memory rows wait to be remapped, or could not be: reset or replace it"),
        ("failed", "GPU 1: memory rows wait to be remapped, or could not be: reset or replace it"),
        ("heat", "GPU 1: heat or power throttles the clock (reasons 0x44)"),
    ],
)
def test_what_the_driver_says_of_a_gpu_is_judged(fault, said, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", PlantedNVML(fault))
    monkeypatch.setattr(preflight, "settled", lambda used: None)  # a minute's patience
    monkeypatch.setattr(preflight, "_rates", lambda gpus: {"GPU 0 matmul TFLOP/s": 700.0})
    found = preflight.check(folder, gpus=2, free=1, token="12", node="a")
    assert found["problems"] == [said] * bool(said)
    assert found["rates"] == ({} if said else {"GPU 0 matmul TFLOP/s": 700.0})
    assert (found["software"]["driver"], found["software"]["GPU"]) == ("580.1", "NVIDIA H100")


def test_other_software_than_on_most_nodes_is_named(folder):
    software = json.loads((folder / "a.json").read_text())["software"]
    change(folder, "c", software=software | {"torch": "1.0"})
    assert verdicts(folder) | {"c": ""} == {"a": "ok", "b": "ok", "c": "", "d": "ok"}
    assert "torch is 1.0, on most nodes" in verdicts(folder)["c"]


@pytest.mark.parametrize("seconds", [-60, 60])
def test_a_clock_that_is_off_is_named(folder, seconds):
    change(folder, "b", clock=time.time() + seconds)
    assert "its clock is off by" in verdicts(folder)["b"]
    assert verdicts(folder)["a"] == "ok"
    assert verdicts(folder, "b") == {"b": "ok"}


def test_of_two_nodes_the_clock_that_is_not_ours_is_named(folder):
    change(folder, "a", clock=(now := time.time()))
    change(folder, "b", clock=now - 60)
    assert verdicts(folder, "ab")["a"] == "ok"
    assert "its clock is off by -60 s" in verdicts(folder, "ab")["b"]


def test_a_wrong_clock_where_the_nodes_are_judged_harms_none(folder):
    for node in "abcd":
        change(folder, node, clock=time.time() - 3600)
    assert verdicts(folder) == dict.fromkeys("abcd", "ok")


def test_the_slow_gpu_of_a_job_is_named(folder):
    usual = {"GPU 0 matmul TFLOP/s": 700.0, "GPU 1 matmul TFLOP/s": 690.0, "all-reduce GB/s": 400.0}
    for node in "abcd":
        change(folder, node, rates=usual)
    change(folder, "d", rates=usual | {"GPU 1 matmul TFLOP/s": 500.0})
    assert verdicts(folder)["d"] == "unfit: GPU 1 matmul TFLOP/s: 500, the job's median is 695"
    change(folder, "d", rates=usual | {"all-reduce GB/s": 100.0})
    assert verdicts(folder)["d"] == "unfit: all-reduce GB/s: 100, the job's median is 400"
    assert verdicts(folder)["a"] == "ok"
