"""The CUDA kernel compiles for Hopper and Blackwell, with nvcc and as torch does it at run time, without spilling."""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from limits import limit
from torch.utils import cpp_extension

from grpo_kernels.token_loss import Tokens

cuda_rows = pytest.importorskip("grpo_kernels.cuda_rows", reason="triton is not installed", exc_type=ImportError)
CLUSTER = b"\x04\x3d\x0c\x00"
"""What comes before the three dimensions of a kernel's cluster in a cubin (EIATTR_CTA_PER_CLUSTER, 12 bytes)."""
KERNELS = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("ctas", cuda_rows.CLUSTERS)
@pytest.mark.parametrize("architecture", [90, pytest.param(100, marks=pytest.mark.long)])
def test_registers_and_spills(architecture, ctas, tmp_path):
    uses = "\n".join(f"void* use_{k} = (void*){cuda_rows.kernel_name(*dtypes)};" for k, dtypes in enumerate(KERNELS))
    (tmp_path / "kernels.cu").write_text(f'#include "grpo_rows.cu"\n{uses}\n')
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    flags = ["-std=c++17", target, "-Xptxas", "-v", "-Werror", "all-warnings", "-cubin", f"-I{cuda_rows.SOURCES}"]
    flags.append(f"-DCTAS={ctas}")
    done = subprocess.run(
        ["nvcc", *flags, "kernels.cu", "-o", "kernels.cubin"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=limit(300),
    )
    assert done.returncode == 0, done.stderr
    registers = [int(found) for found in re.findall(r"Used (\d+) registers", done.stderr)]
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    assert len(registers) == len(KERNELS), done.stderr
    assert max(registers) * cuda_rows.THREADS * 4 <= 65536  # 4: __launch_bounds__ in grpo_rows.cu
    assert spills == [("0", "0")] * len(KERNELS)


@pytest.fixture
def nvrtc(monkeypatch):
    """NVRTC, of torch or, where that has no CUDA, of a package that torch finds when it is loaded; and no toolkit."""
    if torch.version.cuda is None:
        library = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "lib", "libnvrtc.so.13")
        if not library.exists():
            pytest.skip("neither torch nor the package nvidia-cuda-nvrtc has NVRTC here")
        ctypes.CDLL(str(library))
        monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)


@pytest.mark.parametrize("architecture", ["90", pytest.param("100", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("dtypes", "ctas"), [*((dtypes, 8) for dtypes in KERNELS), *((KERNELS[1], n) for n in (1, 2, 4))]
)
def test_at_run_time(nvrtc, dtypes, architecture, ctas):
    from torch.cuda._utils import _nvrtc_compile  # what torch.cuda._compile_kernel does before it needs a GPU

    with cuda_rows.some_toolkit():
        binary, name = _nvrtc_compile(
            cuda_rows.kernel_source(ctas), cuda_rows.kernel_name(*dtypes), architecture, [str(cuda_rows.SOURCES)]
        )
    assert binary[:4] == b"\x7fELF"
    assert CLUSTER + struct.pack("<3I", ctas, 1, 1) in binary
    assert "grpo_rows" in name


@pytest.mark.parametrize(
    ("columns", "dtype", "ctas"),
    [
        (9496, torch.bfloat16, 1),
        (37984, torch.bfloat16, 1),
        (75968, torch.bfloat16, 2),
        (151936, torch.bfloat16, 4),
        (262144, torch.bfloat16, 8),
        (18992, torch.float32, 1),
        (151936, torch.float32, 8),
        (400000, torch.float32, 8),
        (40000, torch.bfloat16, 2),  # two would fit as single CTAs
        (80000, torch.bfloat16, 4),
    ],
)
def test_as_few_ctas_as_leave_three_to_a_multiprocessor(columns, dtype, ctas, monkeypatch):
    hopper = SimpleNamespace(shared_memory_per_multiprocessor=228 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: hopper)
    assert cuda_rows.cluster_size.__wrapped__(0, columns, dtype) == ctas


def test_what_it_is_not_for_is_said():
    assert "cpu" in cuda_rows.why_not(torch.device("cpu"), torch.float32, 100)
    logits = torch.zeros(2, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="cpu tensors"):
        cuda_rows.grpo_rows_(
            logits, torch.zeros(2, dtype=torch.int64), None, 8, 1.0, Tokens(*torch.ones(2, 2)), None, True, "zero"
        )
