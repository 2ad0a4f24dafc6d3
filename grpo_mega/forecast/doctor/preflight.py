"""Whether each node is fit to take part in a job: checked on every node in seconds, then judged over all nodes.

    python preflight.py check --folder DIR --gpus 8 --token T     on each node: writes DIR/NODE.json
    python preflight.py judge --folder DIR --nodes a b c          prints `NODE ok`, `NODE silent` or `NODE unfit: why`

This file imports nothing of the project: it must work, and quickly, where the rest of the software does not. `DIR` is
on the file system that the nodes share and has a file `token`, written by the launcher. Without GPUs no rates are
measured. Rates of links between nodes (links.py) are judged as soon as their files exist.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

GIB = 1 << 30
SHARED_MEMORY = 64 << 20
"""Free bytes required in /dev/shm, through which processes of a node exchange data."""
SHARED_MEMORY_PER_GPU = GIB // 4
"""Free bytes per GPU required in /dev/shm for NCCL."""
TEMPORARY_FILES = GIB
"""Free bytes required in the folder for temporary files."""
FOREIGN_MEMORY = 2 * GIB
"""Device memory in bytes that may be in use before the job starts; more belongs to another process."""
PATIENCE = 60.0
"""Seconds within which a job that has just ended must free its device memory."""
SLOWEST = 0.85
"""Share of the job's median rate below which a GPU is too slow."""
SLOWEST_LINK = 0.5
"""Share of the job's median rate below which a link is too slow; other jobs may use links as well."""
CLOCK_SECONDS = 2.0
"""Seconds that a node's clock may differ, in addition to the duration of the checks."""
PACKAGES = ("torch", "megatron-core", "transformer-engine", "sglang", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
SLOWED_DOWN = 0x8 | 0x40 | 0x80
"""NVML's reasons for a low clock: hardware slowdown, thermal slowdown, power brake."""


def check(
    folder: Path, gpus: int, free: int, token: str, node: str, interface: str = "", reads: Sequence[Path] = ()
) -> dict[str, Any]:
    """Checks this node; reports `problems`, `software`, `rates` (unit in the name) and its `clock` at the beginning.

    A node needs `gpus` GPUs, `free` bytes on the folder's disk, `token` in the folder, the network `interface` (unless
    empty), and readable paths `reads`.
    """
    clock = time.time()
    problems = []
    try:
        if (folder / "token").read_text().strip() != token:
            problems.append(f"{folder} does not hold what the first node wrote: another file system?")
    except OSError as error:
        problems.append(f"{folder} cannot be read ({error}): is the file system mounted?")
    problems += _space(folder, gpus, free)
    interfaces = sorted(entry.name for entry in Path("/sys/class/net").iterdir())
    if interface and interface not in interfaces:
        problems.append(f"INTERFACE={interface} is none of: {', '.join(interfaces)}")
    for path in reads:
        if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
            problems.append(f"{path} cannot be read: is its file system mounted?")
    software = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            software[name] = version(name)
    rates: dict[str, float] = {}
    if gpus:
        try:
            gpu_problems, driver = _gpus(gpus)
            problems += gpu_problems
            software |= driver
            # A node with problems is left out whatever its rates, and the measurement needs all GPUs with their memory
            # free.
            rates = {} if problems else _rates(gpus)
        # A GPU that the driver has lost, or that fails under load, raises errors of NVML, CUDA or torch alike.
        except Exception as error:
            problems.append(f"its GPUs fail ({type(error).__name__}: {error}): reset or replace them")
    return {"node": node, "problems": problems, "software": software, "rates": rates, "clock": clock}


def _space(folder: Path, gpus: int, free: int) -> list[str]:
    temporary = Path(os.environ.get("TMPDIR", "/tmp"))
    needs = {temporary: TEMPORARY_FILES, folder: free, Path("/dev/shm"): SHARED_MEMORY + gpus * SHARED_MEMORY_PER_GPU}
    problems = []
    for path, need in needs.items():
        try:
            available = shutil.disk_usage(path).free
        except OSError as error:
            problems.append(f"{path}: {error}")
            continue
        if available < need:
            problems.append(f"{path} has {available >> 20} MiB free and needs {need >> 20}: make room")
    return problems


def _gpus(expected: int) -> tuple[list[str], dict[str, str]]:
    """Problems of the GPUs reported by the driver, and the versions that must be equal on all nodes."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except ImportError:
        return ["nvidia-ml-py is not installed: python -m pip install nvidia-ml-py"], {}
    except Exception as error:
        return [f"no NVIDIA driver answers ({error}): this job needs {expected} GPUs per node"], {}
    handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    problems = [] if len(handles) >= expected else [f"{len(handles)} GPUs instead of {expected}"]
    # A job that has just ended on this node may still hold device memory; its last processes need a moment.
    settled(lambda: max((int(nvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles), default=0))
    for number, handle in enumerate(handles):
        problems += [f"GPU {number}: {problem}" for problem in _gpu(nvml, handle)]
    kinds = sorted({str(nvml.nvmlDeviceGetName(handle)) for handle in handles})
    return problems, {"driver": str(nvml.nvmlSystemGetDriverVersion()), "GPU": ", ".join(kinds)}


def _gpu(nvml: Any, handle: Any) -> list[str]:
    problems = []
    used = nvml.nvmlDeviceGetMemoryInfo(handle).used
    if used > FOREIGN_MEMORY:
        problems.append(f"{used >> 20} MiB are in use before the job starts: end the processes that hold it")
    try:
        errors = nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
        if errors:
            problems.append(f"{errors} uncorrected memory errors since the driver started: reset or replace it")
        _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
        if pending or failed:
            problems.append("memory rows wait to be remapped, or could not be: reset or replace it")
    except nvml.NVMLError_NotSupported:
        # This GPU's memory has no error correction.
        pass
    reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    if reasons & SLOWED_DOWN:
        problems.append(f"heat or power throttles the clock (reasons {reasons:#x})")
    return problems


def settled(used: Callable[[], int], patience: float = PATIENCE) -> None:
    """Waits until at most FOREIGN_MEMORY bytes are `used`, for up to `patience` seconds."""
    deadline = time.monotonic() + patience
    while used() > FOREIGN_MEMORY and time.monotonic() < deadline:
        time.sleep(0.5)


def _rates(gpus: int) -> dict[str, float]:
    """TFLOP/s of a bf16 matrix product per GPU, and GB/s of an all-reduce between the GPUs of this node."""
    import torch

    rates = {}
    for number in range(gpus):
        a = torch.randn(8192, 8192, device=f"cuda:{number}", dtype=torch.bfloat16)
        seconds = _seconds(lambda a=a: a @ a, range(number, number + 1))
        rates[f"GPU {number} matmul TFLOP/s"] = 2 * 8192**3 / seconds / 1e12
    if gpus > 1:
        # One process drives all GPUs, so the measurement needs no process group. The rate is the bus bandwidth of
        # nccl-tests: each GPU sends 2 (n - 1) / n of the data, whose elements have 2 bytes.
        parts = [torch.ones(128 << 20, device=f"cuda:{number}", dtype=torch.bfloat16) for number in range(gpus)]
        seconds = _seconds(lambda: torch.cuda.nccl.all_reduce(parts), range(gpus))
        rates["all-reduce GB/s"] = 2 * parts[0].numel() * 2 * (gpus - 1) / gpus / seconds / 1e9
    return rates


def _seconds(work: Any, gpus: range, times: int = 10) -> float:
    """Seconds per call of `work`, after a warm-up."""
    import torch

    for repetitions in (3, times):
        for number in gpus:
            torch.cuda.synchronize(number)
        began = time.perf_counter()
        for _ in range(repetitions):
            work()
        for number in gpus:
            torch.cuda.synchronize(number)
    return (time.perf_counter() - began) / times


def judge(folder: Path, nodes: list[str], seconds: float) -> dict[str, str]:
    """{node: `ok`, `silent`, or `unfit: why`}, from the reports written within `seconds` and their differences."""
    # Listing the folder makes an NFS client look again; otherwise files that other nodes wrote may stay invisible.
    os.listdir(folder)
    reports: dict[str, dict[str, Any] | None] = dict.fromkeys(nodes)
    for node in nodes:
        with suppress(OSError, ValueError):
            found = json.loads((folder / f"{node}.json").read_text())
            for file in sorted(folder.glob(f"{node}.link-*.json")):
                found["rates"] |= json.loads(file.read_text())
            reports[node] = found
    received = [report for report in reports.values() if report]
    # The median of two nodes' clocks lies between them and would blame neither or both: this machine's clock decides.
    clock = statistics.median([time.time(), *(report["clock"] for report in received)])
    # Versions must be equal on all nodes; which version is wanted is not known here, so the majority counts as right.
    usual = {
        name: Counter(other["software"].get(name, "absent") for other in received).most_common(1)[0][0]
        for report in received
        for name in report["software"]
    }
    # Rates of all GPUs of the job, by their kind.
    kinds: dict[str, list[float]] = {}
    for one in received:
        for name, rate in one["rates"].items():
            kinds.setdefault(_kind(name), []).append(rate)
    medians = {kind: statistics.median(rates) for kind, rates in kinds.items()}
    verdicts = {}
    for node, report in reports.items():
        if report is None:
            verdicts[node] = "silent"
            continue
        problems = [*report["problems"]]
        # The clocks were read within `seconds`. That of a single node is not checked.
        off = report["clock"] - clock
        if len(received) > 1 and abs(off) > seconds + CLOCK_SECONDS:
            problems.append(f"its clock is off by {off:.0f} s, give or take {seconds:.0f}")
        for name, wanted in usual.items():
            installed = report["software"].get(name, "absent")
            if installed != wanted:
                problems.append(f"{name} is {installed}, on most nodes {wanted}")
        for name, rate in report["rates"].items():
            median = medians[_kind(name)]
            if rate < (SLOWEST_LINK if "link" in name else SLOWEST) * median:
                problems.append(f"{name}: {rate:.3g}, the job's median is {median:.3g}")
        verdicts[node] = f"unfit: {'; '.join(problems)}" if problems else "ok"
    return verdicts


def _kind(name: str) -> str:
    return name.split(" ", 2)[2] if name.startswith("GPU ") else name


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["check", "judge"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--free-mb", type=int, default=1024)
    parser.add_argument("--token", default="")
    parser.add_argument("--interface", default="")
    parser.add_argument("--reads", type=Path, nargs="*", default=[])
    parser.add_argument("--nodes", nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=0.0, help="judge: how long the checks took")
    options = parser.parse_args()
    if options.what == "judge":
        for node, verdict in judge(options.folder, options.nodes, options.seconds).items():
            print(node, verdict)
        return
    # The judge looks for reports by Slurm's names of the nodes, which may differ from their host names.
    node = os.environ.get("SLURMD_NODENAME", platform.node())
    report = check(
        options.folder, options.gpus, options.free_mb << 20, options.token, node, options.interface, options.reads
    )
    content = json.dumps(report)
    try:
        temporary = options.folder / f".{node}.tmp"
        temporary.unlink(missing_ok=True)
        # "x" refuses a link that another user of the shared folder has put there.
        with temporary.open("x") as file:
            file.write(content)
        # The judge may read at any time and must not find half a report.
        temporary.rename(options.folder / f"{node}.json")
    except OSError as error:
        sys.exit(f"{node}: {options.folder} cannot be written: {error}")


if __name__ == "__main__":
    main()
