"""Is this machine fit to train? Versions and abilities of software and machine, each with a verdict and what mends it.

Needs nothing but Python: it must be able to say that torch is missing. Whatever may crash or hang when it is imported
is imported in a process of its own.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import operator
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 120
"""How long an import or a command may take."""

OK, ABSENT, WARNING, FAILURE = "ok", "absent", "warning", "failure"
"""Verdicts: fine; not there and not needed here; works worse than it could; training will fail."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: what was found, a verdict, and for those that are not fine why, and a command."""

    name: str
    found: str
    verdict: str = OK
    why: str = ""
    fix: str = ""


@dataclass(frozen=True)
class GPU:
    """One line of nvidia-smi."""

    name: str
    driver: str
    memory: int  # bytes
    bad_memory: int  # uncorrected ECC errors since the last reboot


def examine(runs: Path) -> Iterator[Finding]:
    """Everything, in the order in which it is best mended; `runs` is where run directories will lie."""
    gpus, driver = graphics()
    yield Finding("python", platform.python_version())
    yield driver
    yield from torch(gpus)
    yield from required()
    yield from accelerators(bool(gpus))
    yield apex(bool(gpus))
    yield shared_memory(size_of(Path("/dev/shm")), bool(gpus))
    yield host_memory(main_memory(), sum(gpu.memory for gpu in gpus))
    yield from limits(bool(gpus), any(Path("/sys/class/infiniband").glob("*")))
    yield filesystem(runs)


def graphics() -> tuple[list[GPU], Finding]:
    """GPUs as the driver sees them."""
    if not shutil.which("nvidia-smi"):
        if Path("/proc/driver/nvidia/version").exists():
            return [], Finding(
                "driver",
                "loaded, but nvidia-smi is missing",
                FAILURE,
                "this container was not given the driver's tools",
                "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility ...",
            )
        return [], Finding("driver", "no NVIDIA driver", ABSENT, "training runs on the CPU, over gloo")
    fields = "name,driver_version,memory.total,ecc.errors.uncorrected.volatile.total"
    said, problem = run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
    if problem:
        return [], Finding("driver", "nvidia-smi fails", FAILURE, problem, "sudo modprobe nvidia, or reboot")
    gpus = [_gpu(line) for line in said.splitlines() if line.strip()]
    return gpus, judge_gpus(gpus)


def judge_gpus(gpus: list[GPU]) -> Finding:
    """All of one kind, and none with broken memory."""
    if not gpus:
        return Finding("driver", "no GPU", FAILURE, "nvidia-smi lists none", "nvidia-smi -L; ask for GPUs in the job")
    kinds = sorted({f"{gpu.name}, {gpu.memory / 2**30:.0f} GiB" for gpu in gpus})
    found = f"{gpus[0].driver}; {len(gpus)} x {' and '.join(kinds)}"
    broken = [str(number) for number, gpu in enumerate(gpus) if gpu.bad_memory]
    if broken:
        why = f"uncorrected memory errors on GPU {', '.join(broken)}"
        return Finding("driver", found, FAILURE, why, f"sudo nvidia-smi -r -i {','.join(broken)}, or another node")
    if len(kinds) > 1:
        return Finding("driver", found, WARNING, "GPUs differ, and the smallest decides", "CUDA_VISIBLE_DEVICES=...")
    return Finding("driver", found)


def _gpu(line: str) -> GPU:
    name, driver, memory, errors = (part.strip() for part in line.split(","))
    return GPU(name, driver, int(memory) * 2**20, int(errors) if errors.isdigit() else 0)


PROBE = """
import json, torch
from torch import cuda, distributed
on = cuda.is_available()
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "gpus": cuda.device_count() if on else 0,
    "nccl": ".".join(map(str, cuda.nccl.version())) if distributed.is_nccl_available() else None,
    "gloo": distributed.is_gloo_available(), "bf16": on and cuda.is_bf16_supported(),
    "kernels": "sm_%d%d" % cuda.get_device_capability() in cuda.get_arch_list() if on else True,
}))
"""
NEWEST_TORCH = "python -m pip install --force-reinstall torch"


def torch(gpus: list[GPU]) -> Iterator[Finding]:
    """torch, its CUDA and its NCCL."""
    said, problem = run([sys.executable, "-c", PROBE])
    if problem:
        yield Finding("torch", installed("torch") or "missing", FAILURE, problem, "python -m pip install 'torch>=2.11'")
        return
    able = json.loads(said.splitlines()[-1])
    if not gpus:
        yield Finding("torch", able["version"])
        yield Finding("CUDA", able["cuda"] or "a build for CPUs", ABSENT, "not needed without a GPU")
        if not able["gloo"]:
            yield Finding("gloo", "missing", FAILURE, "processes on a CPU talk through it", NEWEST_TORCH)
        return
    yield judge_torch(able, gpus)
    if able["cuda"]:
        yield judge_driver(able["cuda"], gpus[0].driver)
    if able["nccl"]:
        yield Finding("NCCL", able["nccl"])
    else:
        yield Finding("NCCL", "missing", FAILURE, "this build of torch has none", NEWEST_TORCH)


def judge_torch(able: dict, gpus: list[GPU]) -> Finding:
    """Whether torch can use the GPUs that the driver has."""
    found = able["version"]
    if not able["cuda"]:
        return Finding("torch", found, FAILURE, f"a build for CPUs, on a machine with {len(gpus)} GPUs", NEWEST_TORCH)
    if able["gpus"] < len(gpus):
        why = f"sees {able['gpus']} of {len(gpus)} GPUs"
        return Finding("torch", found, WARNING if able["gpus"] else FAILURE, why, "unset CUDA_VISIBLE_DEVICES")
    if not able["kernels"]:
        return Finding("torch", found, WARNING, f"has no kernels for {gpus[0].name}", NEWEST_TORCH)
    if not able["bf16"]:
        return Finding("torch", found, WARNING, f"{gpus[0].name} has no bf16", "model.dtype=fp32")
    return Finding("torch", found)


OLDEST_DRIVER = {"11": "450", "12": "525", "13": "580"}
"""Driver branch that a major version of CUDA needs (CUDA's release notes, minor version compatibility)."""


def judge_driver(cuda: str, driver: str) -> Finding:
    """Whether the driver is new enough for torch's CUDA."""
    needed = OLDEST_DRIVER.get(cuda.split(".")[0])
    if needed and _numbers(driver) < _numbers(needed):
        why = f"needs driver {needed} or newer, and this is {driver}"
        older = [major for major, branch in OLDEST_DRIVER.items() if _numbers(branch) <= _numbers(driver)]
        fix = f"update the driver, or install a torch for CUDA {max(older)}" if older else "update the driver"
        return Finding("CUDA", cuda, FAILURE, why, fix)
    return Finding("CUDA", cuda)


def required() -> Iterator[Finding]:
    """What pyproject.toml lists; of torch, its version only."""
    for requirement in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        name, wanted = re.fullmatch(r"([\w.-]+)(.*)", requirement).groups()  # type: ignore[union-attr]
        found = installed(name)
        fix = f"python -m pip install '{requirement}'"
        if found is None:
            if name != "torch":
                yield Finding(name, "missing", FAILURE, "training needs it", fix)
        elif not _satisfies(found, wanted):
            yield Finding(name, found, FAILURE, f"{wanted} is needed", fix)
        elif name != "torch":
            yield Finding(name, found)


ACCELERATORS = (
    ("transformer-engine", "transformer_engine.pytorch", "faster layers",
     "python -m pip install --no-build-isolation 'transformer-engine[pytorch]'"),
    ("flash-attn", "flash_attn", "attention over long sequences in little memory",
     "python -m pip install --no-build-isolation flash-attn"),
    ("sglang", "sglang", "fast generation", "python -m pip install sglang"),
    ("torch-memory-saver", "torch_memory_saver", "SGLang can give its memory to the trainer and take it back",
     "python -m pip install torch-memory-saver"),
)  # fmt: skip
"""Package, module, what it is good for, how to get it."""


def accelerators(on_gpu: bool) -> Iterator[Finding]:
    """Optional packages; one that is there and cannot be imported is worse than none."""
    for name, module, use, fix in ACCELERATORS:
        found = installed(name)
        if found is None:
            yield Finding(name, "missing", WARNING if on_gpu else ABSENT, use, fix if on_gpu else "")
            continue
        _, problem = run([sys.executable, "-c", f"import {module}"])
        if problem:
            why = f"cannot be imported: {problem}"
            yield Finding(name, found, FAILURE if on_gpu else WARNING, why, f"python -m pip uninstall -y {name}; {fix}")
        else:
            yield Finding(name, found)


def apex(on_gpu: bool) -> Finding:
    """NVIDIA's Apex is not on PyPI, and the package of that name there is something else."""
    if importlib.util.find_spec("apex") is None:
        return Finding("apex", "missing", ABSENT, "Transformer Engine has what is needed of it" if on_gpu else "")
    _, problem = run([sys.executable, "-c", "import apex.multi_tensor_apply, apex.optimizers"])
    if not problem:
        return Finding("apex", f"NVIDIA's {installed('apex') or ''}".strip())
    why = f"not NVIDIA's, or broken, and Megatron tries to import it: {problem}"
    return Finding("apex", installed("apex") or "unknown", WARNING, why, "python -m pip uninstall -y apex")


def shared_memory(size: int | None, on_gpu: bool) -> Finding:
    """/dev/shm: NCCL, gloo and data between processes of a machine live there; containers often have 64 MiB."""
    needed = (16 if on_gpu else 1) * 2**30
    found = "missing" if size is None else _bytes(size)
    if size is None or size < needed:
        return Finding(
            "shared memory", found, WARNING, f"{_bytes(needed)} are safe",
            "docker run --ipc=host ..., or sudo mount -o remount,size=16G /dev/shm",
        )  # fmt: skip
    return Finding("shared memory", found)


def host_memory(size: int, gpu_memory: int) -> Finding:
    """Main memory: the trainer moves there when it leaves the GPUs, all of them at once."""
    found, needed = _bytes(size), max(gpu_memory, 4 * 2**30)
    if size < needed:
        why = f"{_bytes(needed)} are safe, as much as all GPUs have" if gpu_memory else f"{_bytes(needed)} are safe"
        return Finding("main memory", found, WARNING, why, "ask for all of it: #SBATCH --mem=0, docker run without -m")
    return Finding("main memory", found)


def limits(on_gpu: bool, infiniband: bool) -> Iterator[Finding]:
    """Limits of this shell that its jobs inherit."""
    files = 65_536 if on_gpu else 1024
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield judge_limit("open files", soft, hard, files, "nofile", "-n")
    if infiniband:
        soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        yield judge_limit("locked memory", soft, hard, resource.RLIM_INFINITY, "memlock", "-l")


def judge_limit(name: str, soft: int, hard: int, needed: int, entry: str, flag: str) -> Finding:
    """A limit of the shell against what is needed; RLIM_INFINITY is the largest."""
    if _reaches(soft, needed):
        return Finding(name, _limit(soft))
    value = _limit(needed)
    raise_hard = f"echo '* - {entry} {value}' | sudo tee -a /etc/security/limits.conf"
    fix = f"ulimit {flag} {value}" if _reaches(hard, needed) else raise_hard
    return Finding(name, _limit(soft), WARNING, f"{value} are needed", fix)


def _reaches(limit: int, needed: int) -> bool:
    return limit == resource.RLIM_INFINITY or (needed != resource.RLIM_INFINITY and limit >= needed)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def filesystem(runs: Path) -> Finding:
    """Does what a run directory needs: write, sync, lock, rename; on the nearest folder that exists."""
    folder = next(path for path in (runs.absolute(), *runs.absolute().parents) if path.exists())
    probe = folder / f".doctor-{platform.node()}-{os.getpid()}"
    try:
        with probe.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(b"whole")
            file.flush()
            os.fsync(file.fileno())
        probe = probe.rename(probe.with_suffix(".renamed"))
        assert probe.read_bytes() == b"whole"
    except OSError as error:
        return Finding("filesystem", str(runs), FAILURE, str(error), "run.root=... on a filesystem with locks")
    finally:
        if probe.exists():
            probe.unlink()
    return judge_filesystem(folder, kind_of(folder, Path("/proc/mounts").read_text()), shutil.disk_usage(folder).free)


def judge_filesystem(folder: Path, kind: str, free: int) -> Finding:
    """Room, and whether what is written outlives the machine."""
    found = f"{folder}, {kind}, {_bytes(free)} free"
    if free < 10 * 2**30:
        return Finding("filesystem", found, WARNING, "checkpoints need room", "run.root=... where there is more")
    if kind in ("tmpfs", "ramfs"):
        return Finding("filesystem", found, WARNING, "lies in memory and is lost with the machine", "run.root=...")
    return Finding("filesystem", found)


def kind_of(path: Path, mounts: str) -> str:
    """The kind of the filesystem that holds `path`, from the text of /proc/mounts."""
    points = [(entry[1].replace("\\040", " "), entry[2]) for entry in map(str.split, mounts.splitlines())]
    holding = [(point, kind) for point, kind in points if Path(point) == path or Path(point) in path.parents]
    return max(holding, key=lambda held: len(held[0]))[1]


def size_of(path: Path) -> int | None:
    """Bytes of the filesystem at `path`; None where there is none."""
    return shutil.disk_usage(path).total if path.is_dir() else None


def main_memory() -> int:
    """Bytes of main memory that this process may use: the machine's, or the container's where that is less."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    said = limit.read_text().strip() if limit.is_file() else "max"
    return min(pages, int(said)) if said.isdigit() else pages


def run(command: list[str]) -> tuple[str, str]:
    """What a command prints, and what is wrong with it: its last words, "" when it ends well."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return "", f"no answer in {SECONDS} s"
    except OSError as error:
        return "", str(error)
    if done.returncode == 0:
        return done.stdout, ""
    last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
    return done.stdout, f"ended by signal {-done.returncode}" if done.returncode < 0 else last


def installed(name: str) -> str | None:
    """Version of a package, without importing it; None when it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


_COMPARE: dict[str, Callable] = {
    ">=": operator.ge,
    "<": operator.lt,
    "==": operator.eq,
    ">": operator.gt,
    "<=": operator.le,
}


def _satisfies(found: str, wanted: str) -> bool:
    """Whether a version lies within bounds such as >=0.16.1,<0.17."""
    bounds = re.findall(r"(>=|<=|==|<|>)\s*([\d.]+)", wanted)
    return all(_COMPARE[sign](_numbers(found), _numbers(bound)) for sign, bound in bounds)


def _numbers(text: str) -> tuple[int, ...]:
    """(2, 13, 0) of 2.13.0+cpu."""
    return tuple(int(number) for number in re.findall(r"\d+", re.split(r"[+a-zA-Z-]", text)[0]))


def _bytes(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
