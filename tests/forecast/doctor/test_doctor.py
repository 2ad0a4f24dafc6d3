"""The doctor on this machine, and on sick ones: planted packages, drivers, limits and folders."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tomllib
import venv
from importlib import util
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from limits import limit
from ranks import REPOSITORY

from grpo_mega.forecast.doctor import machine, packages, software
from grpo_mega.forecast.doctor.finding import ABSENT, FAILURE, OK, WARNING, Finding
from grpo_mega.forecast.doctor.machine import InstalledGPU
from grpo_mega.judges.sandbox.pool import problem

DOCTOR = REPOSITORY / "tools" / "doctor.py"
PYPI_APEX = "raise ImportError('cannot import name UnencryptedCookieSessionFactoryConfig from pyramid.session')"
H100 = "NVIDIA H100 80GB HBM3, {driver}, 81559, {errors}"
no_gpu = pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="this machine has a GPU")
TORCH = """
from types import SimpleNamespace as Module
__version__, version = "2.13.0+cpu", Module(cuda=None)
cuda = Module(is_available=lambda: False, device_count=lambda: 0, get_arch_list=list)
distributed = Module(is_nccl_available=lambda: False, is_gloo_available=lambda: True)
"""
"""What the doctor asks of a build for CPUs; torch itself takes seconds to import."""
HEALTHY = InstalledGPU("NVIDIA H100 80GB HBM3", "550.54.15", 81559 * 2**20, 0)


def consult(
    folder: Path, *arguments: str, path: Path | None = None, shell: str = "", python: str = sys.executable
) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code, and {name: finding}; packages in `folder` come first, and commands in `path`."""
    environment = os.environ | {"PYTHONPATH": str(folder)}
    if path is not None:
        environment["PATH"] = f"{path}{os.pathsep}{environment['PATH']}"
    command = f'{shell} exec "$0" "$@"'
    done = subprocess.run(
        ["bash", "-c", command, python, str(DOCTOR), "--json", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit(120),
    )
    assert done.stderr == ""
    report = json.loads(done.stdout)
    findings = {finding.pop("name"): finding for finding in report["findings"]}
    assert len(findings) == len(report["findings"]), "one finding for each name"
    assert report["fit"] == (done.returncode == 0) == all(f["verdict"] != FAILURE for f in findings.values())
    return done.returncode, findings


def plant(folder: Path, name: str, version: str, code: str = "", module: str = "") -> None:
    """A package that can be found, and imported as far as `code` goes; its module, or one of these, is `module`."""
    own = name.replace("-", "_")
    (folder / (module or own)).mkdir(parents=True)
    (folder / (module or own) / "__init__.py").write_text(code)
    about = folder / f"{own}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder, but for a torch that is imported in no time."""
    plant(tmp_path, "torch", "2.13.0+cpu", TORCH)
    return tmp_path


def plant_driver(folder: Path, output: str, code: int = 0) -> Path:
    folder.mkdir()
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\nexit {code}\n")
    (folder / "nvidia-smi").chmod(0o755)
    return folder


@no_gpu
def test_this_machine_is_fit_and_everything_is_looked_at(tmp_path: Path) -> None:
    code, found = consult(tmp_path)
    assert code == 0, found
    required = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {requirement.split(">")[0].split("<")[0] for requirement in required}
    packages = {"nvidia-ml-py", "transformer-engine", "apex", "sglang", "torch-memory-saver", "deep-ep"}
    packages |= {"flash-attn-3", "flash-attn-4"}
    others = {"python", "driver", "CUDA", "shared memory", "main memory", "open files", "sandbox", "filesystem"}
    assert names | packages | others == found.keys()
    assert all(finding["why"] and finding["fix"] for finding in found.values() if finding["verdict"] == WARNING)
    assert [*tmp_path.iterdir()] == [], "nothing is left behind"


def test_nothing_but_python_is_needed(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    code, found = consult(tmp_path, python=str(tmp_path / "bare" / "bin" / "python"))
    assert code == 1
    assert (found["torch"]["verdict"], found["torch"]["fix"]) == (FAILURE, "python -m pip install 'torch>=2.11'")
    assert found["megatron-core"] == {
        "found": "missing",
        "verdict": FAILURE,
        "why": "training needs it",
        "fix": "python -m pip install 'megatron-core>=0.16.1,<0.17'",
    }


def test_what_packages_are_for_is_said_on_a_gpu_and_in_the_documentation(folder: Path) -> None:
    path = plant_driver(folder / "bin", H100.format(driver="580.65.06", errors=0))
    _, found = consult(folder, path=path)
    text = (REPOSITORY / "docs" / "clusters.md").read_text()
    for package in packages.PACKAGES:
        assert f"| {package.name} | {package.used_for} | {package.without} |\n" in text
        if (finding := found[package.name])["found"] == "missing":
            assert finding["why"] == f"for {package.used_for}; without it: {package.without}"
            wanted = (WARNING, package.install) if package.missed else (ABSENT, "")
            assert (finding["verdict"], finding["fix"]) == wanted
    assert f" | {packages.APEX_USE} | {packages.APEX_WITHOUT} |\n" in text


def test_versions_beside_the_lock_are_named(folder: Path) -> None:
    path = plant_driver(folder / "bin", H100.format(driver="580.65.06", errors=0))
    plant(folder, "sglang", "0.5.20")
    _, found = consult(folder, path=path)
    finding = found["constraints-gpu.txt"]
    assert finding["verdict"] == WARNING
    assert "sglang 0.5.20 for 0.5.23, " in finding["why"]
    assert "docs/first_gpu.md" in finding["fix"]


def test_versions_of_the_lock_are_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lock.txt").write_text(f"# chosen\npytest=={version('pytest')}\nnot-installed==1.0\n")
    monkeypatch.setattr(software, "LOCK", tmp_path / "lock.txt")
    assert software.locked() == Finding("lock.txt", "1 of 2 packages")


@no_gpu
def test_sick_packages_are_told_apart(tmp_path: Path) -> None:
    plant(tmp_path, "megatron-core", "0.15.3")
    plant(tmp_path, "torch", "2.9.1+cu126")
    plant(tmp_path, "apex", "0.9.10.dev0", PYPI_APEX)
    plant(tmp_path, "transformer-engine", "2.9.0", "raise ImportError('undefined symbol: cublasLtGrouped')")
    plant(tmp_path, "flash_attn_3", "3.0.0", "raise ImportError('undefined symbol: aoti')", "flash_attn_interface")
    plant(tmp_path, "flash-attn-4", "4.0.0", "import os; os.kill(os.getpid(), 11)", "flash_attn/cute")
    plant(tmp_path, "sglang", "0.5.23")
    code, found = consult(tmp_path)
    assert code == 1
    assert found["megatron-core"]["verdict"] == FAILURE
    assert found["megatron-core"]["why"] == ">=0.16.1,<0.17 is needed"
    assert (found["torch"]["found"], found["torch"]["why"]) == ("2.9.1+cu126", ">=2.11 is needed")
    assert found["apex"]["verdict"] == WARNING
    assert "not NVIDIA's, or broken" in found["apex"]["why"]
    assert found["apex"]["fix"] == "python -m pip uninstall -y apex"
    # Without a GPU nobody uses these.
    assert found["transformer-engine"]["verdict"] == WARNING
    assert "transformer_engine" in found["transformer-engine"]["why"] or "cublas" in found["transformer-engine"]["why"]
    assert found["flash-attn-3"]["verdict"] == WARNING
    assert "aoti" in found["flash-attn-3"]["why"]
    assert found["flash-attn-4"]["verdict"] == WARNING
    assert found["flash-attn-4"]["why"] == "cannot be imported: ended by signal 11"
    assert (found["sglang"]["verdict"], found["sglang"]["found"]) == (OK, "0.5.23")
    assert found["torch-memory-saver"]["verdict"] == ABSENT


@pytest.mark.parametrize(
    ("version", "verdict"),
    [("2.20.2", FAILURE), pytest.param("2.8.0", FAILURE, marks=pytest.mark.long), ("2.11.0", OK)],
)
def test_megatron_does_not_work_with_every_transformer_engine(version: str, verdict: str, folder: Path) -> None:
    path = plant_driver(folder / "bin", H100.format(driver="580.65.06", errors=0))
    plant(folder, "transformer-engine", version)
    (folder / "transformer_engine" / "pytorch.py").touch()
    _, found = consult(folder, path=path)
    finding = found["transformer-engine"]
    assert (finding["found"], finding["verdict"]) == (version, verdict)
    if verdict == FAILURE:
        assert finding["why"] == ">=2.9,<2.12 is what megatron-core works with; training refuses this one"
        assert finding["fix"].endswith("'transformer-engine[pytorch]>=2.9,<2.12'")


def test_nvidias_apex_is_known(folder: Path) -> None:
    plant(folder, "apex", "0.1")
    for name in ("multi_tensor_apply", "optimizers"):
        (folder / "apex" / f"{name}.py").touch()
    _, found = consult(folder)
    assert (found["apex"]["verdict"], found["apex"]["found"]) == (OK, "NVIDIA's 0.1")


def test_a_gpu_that_torch_cannot_use(tmp_path: Path) -> None:
    """Eight GPUs, one of them with broken memory, a torch for CPUs, and a Transformer Engine that cannot be loaded."""
    lines = [H100.format(driver="550.54.15", errors=3 if number == 5 else 0) for number in range(8)]
    path = plant_driver(tmp_path / "bin", "\n".join(lines))
    plant(tmp_path, "transformer-engine", "2.9.0", "raise ImportError('undefined symbol')")
    code, found = consult(tmp_path, path=path)
    assert code == 1
    assert found["driver"]["found"] == "550.54.15; 8 x NVIDIA H100 80GB HBM3, 80 GiB"
    assert (found["driver"]["verdict"], found["driver"]["why"]) == (FAILURE, "uncorrected memory errors on GPU 5")
    assert "nvidia-smi -r -i 5" in found["driver"]["fix"]
    assert found["torch"]["verdict"] == FAILURE
    assert found["transformer-engine"]["verdict"] == FAILURE
    assert found["sglang"]["verdict"] == (OK if software.installed("sglang") else WARNING)
    assert found["flash-attn-4"]["verdict"] == ABSENT, "torch has what training uses"
    assert found["nvidia-ml-py"]["verdict"] == (OK if util.find_spec("pynvml") else WARNING)


@pytest.mark.parametrize(
    ("output", "code", "message"),
    [
        ("NVIDIA-SMI has failed because it couldn't communicate", 9, "NVIDIA-SMI has failed"),
        pytest.param(
            "Unable to determine the device handle for GPU 0000:4F:00.0",
            0,
            "Unable to determine the device",
            marks=pytest.mark.long,
        ),
        pytest.param("", 0, "lists none", marks=pytest.mark.long),
    ],
)
def test_a_driver_that_does_not_answer(output: str, code: int, message: str, folder: Path) -> None:
    path = plant_driver(folder / "bin", output, code)
    code, found = consult(folder, path=path)
    assert code == 1
    assert found["driver"]["verdict"] == FAILURE
    assert message in found["driver"]["why"]


@no_gpu
def test_limits_of_the_shell(folder: Path) -> None:
    _, found = consult(folder, shell="ulimit -Sn 256;")
    assert found["open files"] == {
        "found": "256",
        "verdict": WARNING,
        "why": "1024 are needed",
        "fix": "ulimit -n 1024",
    }
    _, found = consult(folder, shell="ulimit -n 256;")
    assert found["open files"]["fix"].startswith("echo '* - nofile 1024' | sudo tee -a /etc/security/limits.conf")


def test_what_contains_programs(folder: Path) -> None:
    """Without bubblewrap it is Landlock, or nothing where the kernel has none; neither makes a machine unfit."""
    if shutil.which("bwrap") and not problem("bubblewrap"):
        assert consult(folder)[1]["sandbox"] == {"found": "bubblewrap", "verdict": OK, "why": "", "fix": ""}
    _, found = consult(folder, shell="PATH=/nonexistent")
    expected = ABSENT if problem("landlock") else WARNING
    assert found["sandbox"]["verdict"] == expected
    assert "bwrap is not installed" in found["sandbox"]["why"]
    assert "apt-get install bubblewrap" in found["sandbox"]["fix"]


def test_a_folder_that_cannot_hold_runs(folder: Path) -> None:
    (folder / "file").touch()
    code, found = consult(folder, "--runs", str(folder / "file" / "runs"))
    assert code == 1
    assert found["filesystem"]["verdict"] == FAILURE
    assert "Not a directory" in found["filesystem"]["why"]


def test_output_for_people(folder: Path) -> None:
    plant(folder, "megatron-core", "0.17.1")
    done = subprocess.run(
        [sys.executable, str(DOCTOR)],
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=limit(120),
    )
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    (at,) = (number for number, line in enumerate(lines) if line.startswith("failure"))
    assert lines[at].split() == ["failure", "megatron-core", "0.17.1:", ">=0.16.1,<0.17", "is", "needed"]
    assert lines[at + 1].strip() == "python -m pip install 'megatron-core>=0.16.1,<0.17'"
    assert lines[-1] == "not fit to train: megatron-core"


ABLE: dict[str, Any] = {"version": "2.13.0", "cuda": "13.0", "gpus": 2, "bf16": True, "kernels": True}


@pytest.mark.parametrize(
    ("changed", "verdict", "why"),
    [
        ({}, OK, ""),
        ({"cuda": None, "gpus": 0}, FAILURE, "a build for CPUs, on a machine with 2 GPUs"),
        ({"gpus": 0}, FAILURE, "sees 0 of 2 GPUs"),
        ({"gpus": 1}, WARNING, "sees 1 of 2 GPUs"),
        ({"kernels": False}, WARNING, "has no kernels for NVIDIA H100 80GB HBM3"),
        ({"bf16": False}, WARNING, "NVIDIA H100 80GB HBM3 has no bf16"),
    ],
)
def test_what_torch_can_do_with_gpus(changed: dict[str, Any], verdict: str, why: str) -> None:
    found = software.judge_torch(ABLE | changed, [HEALTHY, HEALTHY])
    assert (found.verdict, found.why) == (verdict, why)
    assert bool(found.fix) == (verdict != OK)


@pytest.mark.parametrize(
    ("cuda", "driver", "verdict", "fix"),
    [
        ("13.0", "580.65.06", OK, ""),
        ("13.0", "575.51.03", FAILURE, "update the driver, or install a torch for CUDA 12"),
        ("12.6", "525.60.13", OK, ""),
        ("12.6", "470.57.02", FAILURE, "update the driver, or install a torch for CUDA 11"),
        ("11.8", "418.1", FAILURE, "update the driver"),
        ("14.0", "580.65.06", OK, ""),
    ],
)
def test_old_drivers(cuda: str, driver: str, verdict: str, fix: str) -> None:
    found = software.judge_driver(cuda, driver)
    assert (found.verdict, found.fix) == (verdict, fix)


def test_a_gpu_without_memory_of_its_own(folder: Path) -> None:
    path = plant_driver(folder / "bin", "NVIDIA GB10, 580.95.05, [N/A], [N/A]")
    _, found = consult(folder, path=path)
    assert (found["driver"]["verdict"], found["driver"]["found"]) == (OK, "580.95.05; 1 x NVIDIA GB10, 0 GiB")


def test_gpus_of_several_kinds() -> None:
    other = InstalledGPU("NVIDIA A100", HEALTHY.driver, 40960 * 2**20, 0)
    found = machine.judge_gpus([HEALTHY, other])
    assert found.verdict == WARNING
    assert "NVIDIA A100, 40 GiB and NVIDIA H100 80GB HBM3, 80 GiB" in found.found
    assert machine.judge_gpus([HEALTHY, HEALTHY]) == Finding("driver", "550.54.15; 2 x NVIDIA H100 80GB HBM3, 80 GiB")


@pytest.mark.parametrize(
    ("size", "on_gpu", "verdict"),
    [
        (64 * 2**20, False, WARNING),
        (None, False, WARNING),
        (2**30, False, OK),
        (2**30, True, WARNING),
        (2**34, True, OK),
    ],
)
def test_shared_memory(size: int | None, on_gpu: bool, verdict: str) -> None:
    found = machine.shared_memory(size, on_gpu)
    assert found.verdict == verdict
    assert bool(found.fix) == (verdict == WARNING)


def test_main_memory_takes_in_what_the_gpus_hold() -> None:
    assert machine.host_memory(2**41, 8 * 80 * 2**30).verdict == OK
    found = machine.host_memory(2**39, 8 * 80 * 2**30)
    assert (found.verdict, found.found) == (WARNING, "512.0 GiB")
    assert found.why == "640.0 GiB are safe, as much as all GPUs have"
    assert machine.host_memory(2**33, 0).verdict == OK
    assert machine.host_memory(2**31, 0).verdict == WARNING


def test_unlimited_is_more_than_any_number() -> None:
    unlimited = resource.RLIM_INFINITY
    locked = machine.judge_limit("locked memory", 65536, unlimited, unlimited, "memlock", "-l")
    assert (locked.verdict, locked.fix) == (WARNING, "ulimit -l unlimited")
    assert machine.judge_limit("locked memory", unlimited, unlimited, unlimited, "memlock", "-l").verdict == OK
    assert machine.judge_limit("open files", unlimited, unlimited, 1024, "nofile", "-n").verdict == OK
    refused = machine.judge_limit("locked memory", 65536, 65536, unlimited, "memlock", "-l")
    assert "sudo tee" in refused.fix


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/home/me/runs", "ext4"),
        ("/scratch/runs", "lustre"),
        ("/scratch2", "ext4"),
        ("/my disk/runs", "nfs4"),
        ("/scratch/memory/runs", "tmpfs"),
        ("/twice/runs", "xfs"),
    ],
)
def test_kind_of_filesystem(path: str, kind: str) -> None:
    mounts = "\n".join([
        "/dev/vda / ext4 rw 0 0",
        "mds@tcp:/one /scratch lustre rw,flock 0 0",
        "tmpfs /scratch/memory tmpfs rw 0 0",
        "tmpfs /twice tmpfs rw 0 0",
        "/dev/vdb /twice xfs rw 0 0",
        "server:/two /my\\040disk nfs4 rw 0 0",
    ])  # fmt: skip
    assert machine.kind_of(Path(path), mounts) == kind


@pytest.mark.parametrize(
    ("kind", "free", "verdict"), [("lustre", 2**40, OK), ("tmpfs", 2**40, WARNING), ("ext4", 2**30, WARNING)]
)
def test_filesystems(kind: str, free: int, verdict: str) -> None:
    assert machine.judge_filesystem(Path("/runs"), kind, free).verdict == verdict


@pytest.mark.parametrize(
    ("found", "wanted", "satisfied"),
    [
        ("0.16.1", ">=0.16.1,<0.17", True),
        ("0.16.0", ">=0.16.1,<0.17", False),
        ("0.17.0rc1", ">=0.16.1,<0.17", False),
        ("2.13.0+cpu", ">=2.11", True),
        ("2.9.1", ">=2.11", False),
        ("1.0", "", True),
    ],
)
def test_versions(found: str, wanted: str, satisfied: bool) -> None:
    assert software._satisfies(found, wanted) == satisfied
