"""Checks of torch with its CUDA and NCCL, the packages of pyproject.toml, and packages that make training faster."""

from __future__ import annotations

import importlib.util
import json
import operator
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from grpo_mega.forecast.doctor.finding import ABSENT, FAILURE, WARNING, Finding, run
from grpo_mega.forecast.doctor.machine import InstalledGPU
from grpo_mega.forecast.doctor.packages import APEX_USE, APEX_WITHOUT, PACKAGES

ROOT = Path(__file__).resolve().parents[3]
LOCK = ROOT / "constraints-gpu.txt"
SHOWN = 5
"""Most packages that a finding names."""

# Code for sm_X.Y runs on GPUs of the same X and any later Y. Suffixes such as those of sm_90a and sm_120f, which
# restrict code to one GPU or family, are cut off.
PROBE = """
import json, torch
from torch import cuda, distributed
on = cuda.is_available()
major, minor = cuda.get_device_capability() if on else (0, 0)
built = {arch.rstrip("af") for arch in cuda.get_arch_list()}
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "gpus": cuda.device_count() if on else 0,
    "nccl": ".".join(map(str, cuda.nccl.version())) if distributed.is_nccl_available() else None,
    "gloo": distributed.is_gloo_available(), "bf16": on and cuda.is_bf16_supported(),
    "kernels": any(f"sm_{major}{older}" in built for older in range(minor + 1)),
}))
"""
NEWEST_TORCH = "python -m pip install --force-reinstall torch"


def torch(gpus: list[InstalledGPU]) -> Iterator[Finding]:
    """Findings about torch, its CUDA and NCCL; none if torch is missing or too old, which `required` reports."""
    if not _usable("torch"):
        return
    output, problem = run([sys.executable, "-c", PROBE])
    if problem:
        yield Finding("torch", installed("torch") or "", FAILURE, f"cannot be imported: {problem}", NEWEST_TORCH)
        return
    # The probe prints last; imports may print lines before it.
    able = json.loads(output.splitlines()[-1])
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


def judge_torch(able: dict, gpus: list[InstalledGPU]) -> Finding:
    """Finding about torch: whether it can use the GPUs that the driver reports."""
    release = able["version"]
    if not able["cuda"]:
        return Finding("torch", release, FAILURE, f"a build for CPUs, on a machine with {len(gpus)} GPUs", NEWEST_TORCH)
    if able["gpus"] < len(gpus):
        why = f"sees {able['gpus']} of {len(gpus)} GPUs"
        return Finding("torch", release, WARNING if able["gpus"] else FAILURE, why, "unset CUDA_VISIBLE_DEVICES")
    if not able["kernels"]:
        return Finding("torch", release, WARNING, f"has no kernels for {gpus[0].name}", NEWEST_TORCH)
    if not able["bf16"]:
        return Finding("torch", release, WARNING, f"{gpus[0].name} has no bf16", "model.dtype=fp32")
    return Finding("torch", release)


OLDEST_DRIVER = {"11": "450", "12": "525", "13": "580"}
"""Major version of CUDA -> required driver branch (CUDA's release notes, minor version compatibility)."""


def judge_driver(cuda: str, driver: str) -> Finding:
    """Finding about torch's CUDA: whether the driver is recent enough."""
    needed = OLDEST_DRIVER.get(cuda.split(".")[0])
    if needed and _numbers(driver) < _numbers(needed):
        why = f"needs driver {needed} or newer, and this is {driver}"
        older = [major for major, branch in OLDEST_DRIVER.items() if _numbers(branch) <= _numbers(driver)]
        fix = f"update the driver, or install a torch for CUDA {max(older)}" if older else "update the driver"
        return Finding("CUDA", cuda, FAILURE, why, fix)
    return Finding("CUDA", cuda)


def required() -> Iterator[Finding]:
    """Findings about the packages in pyproject.toml; a usable torch is reported by `torch`."""
    for name, wanted in _wanted().items():
        release, fix = installed(name), f"python -m pip install '{name}{wanted}'"
        if release is None:
            yield Finding(name, "missing", FAILURE, "training needs it", fix)
        elif not _usable(name):
            yield Finding(name, release, FAILURE, f"{wanted} is needed", fix)
        elif name != "torch":
            yield Finding(name, release)


def _wanted() -> dict[str, str]:
    """{package: version bounds}, from pyproject.toml."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    # Split before the first comparison, or at the end of a name without bounds.
    return dict(re.split(r"(?=[<>=]|$)", entry, maxsplit=1) for entry in listed)


def _usable(name: str) -> bool:
    release = installed(name)
    return release is not None and _satisfies(release, _wanted()[name])


def optional(on_gpu: bool) -> Iterator[Finding]:
    """Yields findings about optional packages; one that is installed and cannot be imported is worse than none."""
    for package in PACKAGES:
        name, release, fix = package.name, installed(package.name), package.install
        if release is None:
            why = f"for {package.used_for}; without it: {package.without}"
            warned = on_gpu and package.missed
            yield Finding(name, "missing", WARNING if warned else ABSENT, why, fix if warned else "")
            continue
        if not _satisfies(release, package.bounds):
            why = f"{package.bounds} is what megatron-core works with; training refuses this one"
            yield Finding(name, release, FAILURE if on_gpu else WARNING, why, fix)
            continue
        # Packages with compiled code may crash or hang in their import, so another process imports them.
        _, problem = run([sys.executable, "-c", f"import {package.module}"])
        if problem:
            why = f"cannot be imported: {problem}"
            yield Finding(
                name, release, FAILURE if on_gpu else WARNING, why, f"python -m pip uninstall -y {name}; {fix}"
            )
        else:
            yield Finding(name, release)


def locked() -> Finding:
    """Finding about the packages of constraints-gpu.txt that are installed in other versions, in the file's order."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", LOCK.read_text(), re.MULTILINE))
    # Installed versions may have a local part, such as +cu130, which the pins lack.
    here = {name: release.split("+")[0] for name in pins if (release := installed(name))}
    others = [f"{name} {release} for {pins[name]}" for name, release in here.items() if release != pins[name]]
    found = f"{len(here)} of {len(pins)} packages"
    if not others:
        return Finding(LOCK.name, found)
    more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
    why = f"not the versions tested together: {', '.join(others[:SHOWN])}{more}"
    return Finding(LOCK.name, found, WARNING, why, "rebuild the environment as in docs/first_gpu.md")


def apex(on_gpu: bool) -> Finding:
    """Finding about NVIDIA's Apex, which is not on PyPI: the package of that name there is something else."""
    if importlib.util.find_spec("apex") is None:
        return Finding("apex", "missing", ABSENT, f"for {APEX_USE}; without it: {APEX_WITHOUT}" if on_gpu else "")
    # PyPI's package lacks these modules, which Megatron imports.
    _, problem = run([sys.executable, "-c", "import apex.multi_tensor_apply, apex.optimizers"])
    if not problem:
        return Finding("apex", f"NVIDIA's {installed('apex') or ''}".strip())
    why = f"not NVIDIA's, or broken, and Megatron tries to import it: {problem}"
    return Finding("apex", installed("apex") or "unknown", WARNING, why, "python -m pip uninstall -y apex")


def installed(name: str) -> str | None:
    """Version of a package, found without importing it; None when it is not installed."""
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


def _satisfies(installed_version: str, wanted: str) -> bool:
    """Whether a version is within bounds such as >=0.16.1,<0.17."""
    bounds = re.findall(r"(>=|<=|==|<|>)\s*([\d.]+)", wanted)
    return all(_COMPARE[sign](_numbers(installed_version), _numbers(bound)) for sign, bound in bounds)


def _numbers(text: str) -> tuple[int, ...]:
    """Numbers of a version: (2, 13, 0) for 2.13.0+cpu."""
    return tuple(int(number) for number in re.findall(r"\d+", re.split(r"[+a-zA-Z-]", text)[0]))
