"""Whether a node is fit to take part in a job: checked on every node in seconds, then judged over all of them.

    python preflight.py check --folder DIR --gpus 8 --token T     on each node: writes DIR/NODE.json
    python preflight.py judge --folder DIR --nodes a b c          prints `NODE ok`, `NODE silent` or `NODE unfit: why`

A file of its own that imports nothing of the project: it must work, and be quick, where the software does not.
`DIR` lies on the file system that the nodes share and holds the file `token`, written by who started the checks.
Without GPUs the rates are not measured. Those of links between nodes (links.py) count once they are there.
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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

GIB = 1 << 30
SHARED_MEMORY = 64 << 20
"""Bytes free in /dev/shm; processes of a node exchange data through it."""
SHARED_MEMORY_PER_GPU = GIB // 4
"""More of them for NCCL."""
ROOM = GIB
"""Bytes free in the folder for temporary files."""
FOREIGN_MEMORY = 2 * GIB
"""Device memory in use before the job starts that is somebody else's."""
PATIENCE = 60.0
"""Seconds that the memory of a job that has just ended may take to come back."""
SLOWEST = 0.85
"""Share of the job's median rate below which a GPU is too slow."""
SLOWEST_LINK = 0.5
"""The same for links between nodes, which other jobs may use as well."""
CLOCK_SECONDS = 2.0
"""How far a node's clock may be off, beside the time that the checks took."""
PACKAGES = ("torch", "megatron-core", "transformer-engine", "sglang", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
SLOWED_DOWN = 0x8 | 0x40 | 0x80
"""NVML's reasons for a low clock: hardware slowdown, thermal slowdown, power brake."""


def check(
    folder: Path, gpus: int, free: int, token: str, node: str, interface: str = "", reads: Sequence[Path] = ()
) -> dict[str, Any]:
    """What this node is like: `problems`, `software`, `rates` (unit in the name) and its `clock` at the beginning.

    It needs `gpus` GPUs, `free` bytes on the disk of the folder, `token` in it, the network `interface` unless that is
    empty, and what `reads` names.
    """
    clock = time.time()
    problems = [*_shared_file_system(folder, token), *_space(folder, gpus, free), *_interface(interface)]
    problems += [f"{place} cannot be read: is its file system mounted?" for place in reads if not _readable(place)]
    software, rates = _software(), {}
    if gpus:
        try:
            found, driver = _gpus(gpus)
            problems += found
            software |= driver
            rates = {} if problems else _rates(gpus)
        except Exception as error:  # a GPU that is lost, or fails as soon as it works
            problems.append(f"its GPUs fail ({type(error).__name__}: {error}): reset or replace them")
    return {"node": node, "problems": problems, "software": software, "rates": rates, "clock": clock}


def _shared_file_system(folder: Path, token: str) -> list[str]:
    try:
        found = (folder / "token").read_text().strip()
    except OSError as error:
        return [f"{folder} cannot be read ({error}): is the file system mounted?"]
    return [] if found == token else [f"{folder} shows other content than the first node wrote: another file system?"]


def _space(folder: Path, gpus: int, free: int) -> list[str]:
    temporary = Path(os.environ.get("TMPDIR", "/tmp"))
    needs = {temporary: ROOM, folder: free, Path("/dev/shm"): SHARED_MEMORY + gpus * SHARED_MEMORY_PER_GPU}
    problems = []
    for place, need in needs.items():
        try:
            found = shutil.disk_usage(place).free
        except OSError as error:
            problems.append(f"{place}: {error}")
            continue
        if found < need:
            problems.append(f"{place} has {found >> 20} MiB free and needs {need >> 20}: make room")
    return problems


def _interface(name: str) -> list[str]:
    found = sorted(entry.name for entry in Path("/sys/class/net").iterdir())
    return [] if not name or name in found else [f"INTERFACE={name} is none of: {', '.join(found)}"]


def _readable(place: Path) -> bool:
    return os.access(place, os.R_OK | (os.X_OK if place.is_dir() else 0))


def _software() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _gpus(expected: int) -> tuple[list[str], dict[str, str]]:
    """Problems of the GPUs as the driver sees them, and the versions that must be the same everywhere."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except ImportError:
        return ["nvidia-ml-py is not installed: python -m pip install nvidia-ml-py"], {}
    except Exception as error:
        return [f"no NVIDIA driver answers ({error}): this job needs {expected} GPUs per node"], {}
    handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    problems = [] if len(handles) >= expected else [f"{len(handles)} GPUs instead of {expected}"]
    settled(lambda: max((int(nvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles), default=0))
    for number, handle in enumerate(handles):
        problems += [f"GPU {number}: {problem}" for problem in _gpu(nvml, handle)]
    kinds = sorted({str(nvml.nvmlDeviceGetName(handle)) for handle in handles})
    return problems, {"driver": str(nvml.nvmlSystemGetDriverVersion()), "GPU": ", ".join(kinds)}


def _gpu(nvml: Any, handle: Any) -> list[str]:
    problems = []
    used = nvml.nvmlDeviceGetMemoryInfo(handle).used
    if used > FOREIGN_MEMORY:
        problems.append(f"{used >> 20} MiB are in use before the job starts: end what holds them")
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
        pass  # memory without error correction
    reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    if reasons & SLOWED_DOWN:
        problems.append(f"the clock is held down by heat or power (reasons {reasons:#x})")
    return problems


def settled(used: Callable[[], int], patience: float = PATIENCE) -> None:
    """Returns as soon as the bytes in `used` are nobody else's, or after `patience` seconds."""
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
        parts = [torch.ones(128 << 20, device=f"cuda:{number}", dtype=torch.bfloat16) for number in range(gpus)]
        seconds = _seconds(lambda: torch.cuda.nccl.all_reduce(parts), range(gpus))
        rates["all-reduce GB/s"] = 2 * parts[0].numel() * 2 * (gpus - 1) / gpus / seconds / 1e9
    return rates


def _seconds(work: Any, gpus: range, times: int = 10) -> float:
    """Seconds per call, after a warm-up."""
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
    """Node -> `ok`, `silent`, or `unfit: why`, from what the nodes left within `seconds`, and from how they differ."""
    os.listdir(folder)  # over NFS, files that were not there a moment ago may stay unseen without
    found = {node: _left_by(folder, node) for node in nodes}
    spoke = [report for report in found.values() if report]
    clocks = [time.time(), *(report["clock"] for report in spoke)]  # ours decides between two
    usual = {name: _usual(spoke, name) for report in spoke for name in report["software"]}
    medians = _medians(spoke)
    verdicts = {}
    for node, report in found.items():
        if report is None:
            verdicts[node] = "silent"
            continue
        problems = [
            *report["problems"],
            *_clock(report["clock"] - statistics.median(clocks), seconds, len(spoke)),
            *_versions(report["software"], usual),
            *_slow(report["rates"], medians),
        ]
        verdicts[node] = f"unfit: {'; '.join(problems)}" if problems else "ok"
    return verdicts


def _left_by(folder: Path, node: str) -> dict[str, Any] | None:
    try:
        report: dict[str, Any] = json.loads((folder / f"{node}.json").read_text())
        for file in sorted(folder.glob(f"{node}.link-*.json")):
            report["rates"] |= json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return report


def _usual(reports: list[dict[str, Any]], name: str) -> str:
    return Counter(report["software"].get(name, "absent") for report in reports).most_common(1)[0][0]


def _versions(software: dict[str, str], usual: dict[str, str]) -> list[str]:
    return [
        f"{name} is {software.get(name, 'absent')}, on most nodes {wanted}"
        for name, wanted in usual.items()
        if software.get(name, "absent") != wanted
    ]


def _clock(off: float, seconds: float, nodes: int) -> list[str]:
    """All clocks were read within `seconds`: what is further from most others is wrong; one alone is not judged."""
    wrong = nodes > 1 and abs(off) > seconds + CLOCK_SECONDS
    return [f"its clock is off by {off:.0f} s, give or take {seconds:.0f}"] if wrong else []


def _medians(reports: list[dict[str, Any]]) -> dict[str, float]:
    """Median of each kind of rate over all GPUs of the job."""
    kinds: dict[str, list[float]] = {}
    for report in reports:
        for name, rate in report["rates"].items():
            kinds.setdefault(_kind(name), []).append(rate)
    return {kind: statistics.median(rates) for kind, rates in kinds.items()}


def _kind(name: str) -> str:
    return name.split(" ", 2)[2] if name.startswith("GPU ") else name


def _slow(rates: dict[str, float], medians: dict[str, float]) -> list[str]:
    return [
        f"{name}: {rate:.3g}, the job's median is {medians[_kind(name)]:.3g}"
        for name, rate in rates.items()
        if rate < (SLOWEST_LINK if "link" in name else SLOWEST) * medians[_kind(name)]
    ]


def main() -> None:
    """The command line."""
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
    node = os.environ.get("SLURMD_NODENAME", platform.node())
    found = check(
        options.folder, options.gpus, options.free_mb << 20, options.token, node, options.interface, options.reads
    )
    report = json.dumps(found)
    try:
        temporary = options.folder / f".{node}.tmp"
        temporary.write_text(report)
        temporary.rename(options.folder / f"{node}.json")
    except OSError as error:
        sys.exit(f"{node}: {options.folder} cannot be written: {error}")


if __name__ == "__main__":
    main()
