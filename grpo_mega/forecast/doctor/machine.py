"""Driver and GPUs, memory, limits of the shell, the sandbox, and the filesystem of the run directories."""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grpo_mega.forecast.doctor.finding import ABSENT, FAILURE, WARNING, Finding, binary_size, run
from grpo_mega.judges.sandbox.pool import FIX, best_mechanism


@dataclass(frozen=True)
class InstalledGPU:
    """A GPU, from one line of nvidia-smi."""

    name: str
    driver: str
    memory: int  # bytes
    bad_memory: int  # uncorrected ECC errors since the last reboot


def graphics() -> tuple[list[InstalledGPU], Finding]:
    """The GPUs that the driver reports, and a finding about driver and GPUs."""
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
    output, problem = run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
    lines = [line for line in output.splitlines() if line.strip()]
    # A line without four fields is a message of nvidia-smi, not a GPU; it becomes the reason.
    problem = problem or next((line for line in lines if line.count(",") != 3), "")
    if problem:
        return [], Finding("driver", "nvidia-smi fails", FAILURE, problem, "sudo modprobe nvidia, or reboot")
    gpus = []
    for line in lines:
        name, driver, memory, errors = (part.strip() for part in line.split(","))
        gpus.append(InstalledGPU(name, driver, _number(memory) * 2**20, _number(errors)))
    return gpus, judge_gpus(gpus)


def judge_gpus(gpus: list[InstalledGPU]) -> Finding:
    """Finding about GPUs, which should be of one kind and without memory errors."""
    if not gpus:
        return Finding("driver", "no GPU", FAILURE, "nvidia-smi lists none", "nvidia-smi -L; ask for GPUs in the job")
    kinds = sorted({f"{gpu.name}, {gpu.memory / 2**30:.0f} GiB" for gpu in gpus})
    state = f"{gpus[0].driver}; {len(gpus)} x {' and '.join(kinds)}"
    broken = [str(number) for number, gpu in enumerate(gpus) if gpu.bad_memory]
    if broken:
        why = f"uncorrected memory errors on GPU {', '.join(broken)}"
        return Finding("driver", state, FAILURE, why, f"sudo nvidia-smi -r -i {','.join(broken)}, or another node")
    if len(kinds) > 1:
        return Finding("driver", state, WARNING, "GPUs differ, and the smallest decides", "CUDA_VISIBLE_DEVICES=...")
    return Finding("driver", state)


def _number(text: str) -> int:
    """A number from nvidia-smi, 0 for [N/A]: some GPUs share the host's memory, or have no ECC."""
    return int(text) if text.isdigit() else 0


def shared_memory(size: int | None, on_gpu: bool) -> Finding:
    """Finding about /dev/shm, through which NCCL, gloo and processes exchange data; containers often have 64 MiB."""
    needed = (16 if on_gpu else 1) * 2**30
    state = "missing" if size is None else binary_size(size)
    if size is None or size < needed:
        return Finding(
            "shared memory", state, WARNING, f"{binary_size(needed)} are safe",
            "docker run --ipc=host ..., or sudo mount -o remount,size=16G /dev/shm",
        )  # fmt: skip
    return Finding("shared memory", state)


def host_memory(size: int, gpu_memory: int) -> Finding:
    """Finding about main memory, which must hold the trainer's state of all GPUs while engines use the GPUs."""
    state, needed = binary_size(size), max(gpu_memory, 4 * 2**30)
    if size < needed:
        why = (
            f"{binary_size(needed)} are safe, as much as all GPUs have"
            if gpu_memory
            else f"{binary_size(needed)} are safe"
        )
        return Finding("main memory", state, WARNING, why, "ask for all of it: #SBATCH --mem=0, docker run without -m")
    return Finding("main memory", state)


def limits(on_gpu: bool, infiniband: bool) -> Iterator[Finding]:
    """Findings about limits of this shell that its jobs inherit."""
    files = 65_536 if on_gpu else 1024
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield judge_limit("open files", soft, hard, files, "nofile", "-n")
    # InfiniBand registers its buffers, which locks them in memory.
    if infiniband:
        soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        yield judge_limit("locked memory", soft, hard, resource.RLIM_INFINITY, "memlock", "-l")


def judge_limit(name: str, soft: int, hard: int, needed: int, entry: str, flag: str) -> Finding:
    """Finding about a limit of the shell, compared with the requirement; RLIM_INFINITY is the largest."""
    if _reaches(soft, needed):
        return Finding(name, _limit(soft))
    value = _limit(needed)
    raise_hard = f"echo '* - {entry} {value}' | sudo tee -a /etc/security/limits.conf"
    fix = f"ulimit {flag} {value}" if _reaches(hard, needed) else raise_hard
    return Finding(name, _limit(soft), WARNING, f"{value} are needed", fix)


def _reaches(limit: int, needed: int) -> bool:
    # RLIM_INFINITY is -1 in Python, so that `limit >= needed` alone would call an unlimited shell too small, and an
    # unlimited requirement met by every shell.
    return limit == resource.RLIM_INFINITY or (needed != resource.RLIM_INFINITY and limit >= needed)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def sandbox() -> Finding:
    """Finding about the containment of programs written by a policy; it runs one with each mechanism."""
    mechanism, why = best_mechanism()
    if mechanism is None:
        return Finding("sandbox", "nothing contains programs", ABSENT, f"rewards of code need it: {why}", FIX)
    if mechanism == "landlock":
        return Finding("sandbox", "Landlock and seccomp", WARNING, f"programs cannot write files there: {why}", FIX)
    return Finding("sandbox", mechanism)


def filesystem(runs: Path) -> Finding:
    """Finding about the filesystem: tries to write, sync, lock and rename in the nearest existing folder."""
    # The doctor does not create the directory of runs: it probes the nearest existing folder above it.
    folder = next(path for path in (runs.absolute(), *runs.absolute().parents) if path.exists())
    # Several nodes may probe a shared folder at once, so the name has the node as well as the process.
    probe = folder / f".doctor-{platform.node()}-{os.getpid()}"
    try:
        with probe.open("wb") as file:
            # A run locks its directory, syncs checkpoints and renames them into place; some file systems, such as
            # Lustre mounted without -o flock, refuse one of these.
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
    mounts = Path("/proc/mounts")
    kind = kind_of(folder, mounts.read_text()) if mounts.is_file() else "of some kind"
    return judge_filesystem(folder, kind, shutil.disk_usage(folder).free)


def judge_filesystem(folder: Path, kind: str, free: int) -> Finding:
    """Finding about free space, and whether the filesystem is persistent."""
    state = f"{folder}, {kind}, {binary_size(free)} free"
    if free < 10 * 2**30:
        return Finding("filesystem", state, WARNING, "checkpoints need room", "run.root=... where there is more")
    if kind in ("tmpfs", "ramfs"):
        return Finding("filesystem", state, WARNING, "is in memory, and is lost when the machine stops", "run.root=...")
    return Finding("filesystem", state)


def kind_of(path: Path, mounts: str) -> str:
    """Kind of the filesystem that holds `path`, from the text of /proc/mounts."""
    # The kernel writes a space in a mount point as \040. The longest mount point that contains the path holds it; of
    # several mounts there, the last hides the others.
    points = [(entry[1].replace("\\040", " "), entry[2]) for entry in map(str.split, mounts.splitlines())]
    holding = [(point, kind) for point, kind in points if Path(point) == path or Path(point) in path.parents]
    return max(reversed(holding), key=lambda held: len(held[0]))[1]


def size_of(path: Path) -> int | None:
    """Size in bytes of the filesystem at `path`; None where there is none."""
    return shutil.disk_usage(path).total if path.is_dir() else None


def main_memory() -> int:
    """Bytes of main memory that this process may use: the machine's, or the container's if less."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Control groups of version 2. Their file says "max" where the container has no limit.
    limit = Path("/sys/fs/cgroup/memory.max")
    content = limit.read_text().strip() if limit.is_file() else "max"
    return min(pages, int(content)) if content.isdigit() else pages
