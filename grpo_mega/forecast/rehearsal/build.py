"""Compiles the null GPU, and Transformer Engine's C++, for the environment of Python that runs this.

    .venv-rehearse/bin/python -m grpo_mega.forecast.rehearsal.build

Needs gcc, g++ and nm; the headers are those of the CUDA libraries that torch's CUDA build brings, and those of
`nvidia-cuda-crt`. What the null GPU does not define, and these libraries do, becomes a function that returns 0, for
"success". With --transformer-engine, its extension for torch is compiled as well.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

SOURCES = Path(__file__).parent / "nullgpu"
SITE = Path(sysconfig.get_paths()["purelib"])
NVIDIA = SITE / "nvidia"
CUDA = NVIDIA / "cu13"
TARGET = Path(sys.prefix) / "nullgpu"
"""Where the libraries are: `libnullgpu.so`, to be preloaded, and `libcuda.so.1`."""
DRIVER_HEADERS = ("cuda.h", "cudaTypedefs.h")
TORCH_LIBRARIES = ("torch", "torch_cpu", "torch_cuda", "torch_python", "c10", "c10_cuda")
QUIET = ("-O1", "-fPIC", "-w")


def main() -> int:
    """Builds both; returns 2 when a compiler or CUDA's headers are missing."""
    missing = [tool for tool in ("gcc", "g++", "nm") if shutil.which(tool) is None]
    if missing or not (CUDA / "include" / "cuda.h").exists():
        needed = f"{', '.join(missing)}: install build-essential" if missing else f"{CUDA}: install torch for CUDA 13"
        print(f"error: the null GPU cannot be built without {needed}", file=sys.stderr)
        return 2
    TARGET.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        build_device(Path(scratch))
        if "--transformer-engine" in sys.argv[1:]:
            build_transformer_engine(Path(scratch))
    return 0


def build_device(scratch: Path) -> None:
    """`libnullgpu.so` and `libcuda.so.1` in `TARGET`."""
    include = f"-I{CUDA / 'include'}"
    mine = [_compiled(SOURCES / name, scratch, include) for name in ("runtime.cpp", "blas.c")]
    libraries = {
        "libcudart.so.13": ("cuda", "__cuda"),
        "libcublas.so.13": ("cublas",),
        "libcublasLt.so.13": ("cublas",),
    }
    # What the null GPU does not define must exist all the same, or torch does not load.
    there = {
        name
        for library, prefixes in libraries.items()
        for name in _symbols(["-D", CUDA / "lib" / library])
        if name.startswith(prefixes)
    }
    rest = _succeeding(there - _symbols(mine), scratch / "rest.c", scratch)
    _linked("libnullgpu.so", [*mine, rest])
    driver = _compiled(SOURCES / "driver.c", scratch, include)
    headers = [(CUDA / "include" / header).read_text() for header in DRIVER_HEADERS]
    named = {name for header in headers for name in re.findall(r"\b(cu[A-Z]\w*)\s*\(", header)}
    # The headers' macros turn many names into those of a second version, which the library must have.
    named |= {f"{name}_v2" for name in named}
    rest = _succeeding(named - _symbols([driver]), scratch / "driver_rest.c", scratch)
    _linked("libcuda.so.1", [driver, rest], "-Wl,-soname,libcuda.so.1")


def build_transformer_engine(scratch: Path) -> None:
    """`transformer_engine_torch`, whose 28 files are C++ alone, as one: kernels are in a wheel, and nvcc is not needed.

    Its release is that of the installed Transformer Engine. Its own build would take half an hour, and call nvcc.
    """
    # The sources, from PyPI.
    pip = [sys.executable, "-m", "pip"]
    source = f"transformer-engine-torch=={version('transformer-engine')}"
    fetched = ["--quiet", "--no-cache-dir", "--no-deps", "--no-build-isolation", "--no-binary", ":all:"]
    _run([*pip, "download", *fetched, "--dest", scratch, source])
    shutil.unpack_archive(next(scratch.glob("*.tar.gz")), scratch)
    root = next(path for path in scratch.iterdir() if (path / "csrc").is_dir())
    files = sorted(path for path in root.rglob("*.cpp") if "csrc" in path.parts)
    # One compilation parses torch's headers once instead of 28 times.
    (root / "all.cpp").write_text("".join(f'#include "{path}"\n' for path in files))
    folders = [
        *(folder for folder in root.rglob("*") if folder.is_dir() and folder.name in ("include", "common", "csrc")),
        *(root / "csrc" / name for name in ("extensions", "extensions/multi_tensor")),
        root / "common_headers",
        SITE / "torch/include",
        SITE / "torch/include/torch/csrc/api/include",
        CUDA / "include",
        CUDA / "include/cccl",
        NVIDIA / "cudnn/include",
        NVIDIA / "nccl/include",
        sysconfig.get_paths()["include"],
    ]
    # Defined as by torch's own builder of extensions.
    defined = ("TORCH_EXTENSION_NAME=transformer_engine_torch", "TORCH_API_INCLUDE_EXTENSION_H")
    _run([
        *("g++", "-shared", "-O0", "-g0", "-w", "-fPIC", "-std=c++20", "-fvisibility=hidden"),
        *(f"-D{name}" for name in defined),
        *(f"-I{folder}" for folder in folders),
        root / "all.cpp",
        f"-L{SITE / 'torch/lib'}",
        *(f"-l{library}" for library in TORCH_LIBRARIES),
        *("-o", SITE / f"transformer_engine_torch{sysconfig.get_config_var('EXT_SUFFIX')}"),
    ])  # fmt: skip


def _compiled(source: Path, scratch: Path, *flags: str) -> Path:
    built = scratch / f"{source.stem}.o"
    _run(["g++" if source.suffix == ".cpp" else "gcc", *QUIET, *flags, "-c", source, "-o", built])
    return built


def _linked(name: str, objects: Sequence[Path], *flags: str) -> None:
    _run(["g++", "-shared", *flags, "-o", TARGET / f"{name}.tmp", *objects, "-ldl"])
    # A build that is cut off must not leave half a library, which `Environment.find` would take for a whole one.
    (TARGET / f"{name}.tmp").rename(TARGET / name)


def _succeeding(names: Iterable[str], source: Path, scratch: Path) -> Path:
    """Compiled functions of these names, which return 0."""
    source.write_text("".join(f"int {name}() {{ return 0; }}\n" for name in sorted(names)))
    return _compiled(source, scratch)


def _symbols(of: Sequence[str | Path]) -> set[str]:
    """Names of the functions that libraries define; the first argument may be an option of nm."""
    listed = _run(["nm", "--defined-only", *of])
    return {name.split("@")[0] for name in re.findall(r"^[0-9a-f]+ [TW] (\S+)$", listed, re.MULTILINE)}


def _run(command: Sequence[str | Path]) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode:
        print(f"error: {' '.join(map(str, command[:4]))} ... failed:\n{done.stderr[-4000:]}", file=sys.stderr)
        raise SystemExit(2)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
