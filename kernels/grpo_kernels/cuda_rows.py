"""`grpo_rows_` as a CUDA kernel that holds a row in the shared memory of a cluster of CTAs: one read, one write.

For float32 and bfloat16 on GPUs of compute capability 9.0 on. The source in `csrc/` is compiled at run time by NVRTC,
which comes with torch, through `torch.cuda._compile_kernel`: no build step and no host compiler, but a private function
of torch, so `why_not` tries it before anything depends on it. The other row operations use Triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import launch
from grpo_kernels.options import LossOptions
from grpo_kernels.token_loss import Tokens
from grpo_kernels.triton_rows import OUTPUTS, row_gradient_, row_stats

__all__ = ["grpo_rows_", "row_gradient_", "row_stats", "why_not"]

SOURCES = Path(__file__).with_name("csrc")
TYPES = {torch.float32: "float", torch.bfloat16: "BFloat16"}
CLUSTERS, THREADS = (1, 2, 4, 8), 256
"""Cluster sizes in CTAs, each compiled separately (the macro CTAS), and threads of a CTA, as in `csrc/row_math.cuh`."""
AT_ONCE = 3
"""CTAs that must fit on a multiprocessor, at least: while one computes, the others use the memory's
bandwidth. Smaller clusters that leave this room were faster (docs/kernels.md)."""
OWN_SHARED_MEMORY = 1024 + 256
"""Bytes of shared memory that a CTA uses in addition to its part of a row: the system's, and the kernel's own
variables."""


def why_not(device: torch.device, dtype: torch.dtype, columns: int, gradient: torch.dtype | None = None) -> str:
    """Why the kernel cannot read such logits and write such a gradient (None: of their dtype); empty when it can.

    Compiles the kernel when nothing else prevents its use.
    """
    gradient = dtype if gradient is None else gradient
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{device.type} tensors: it is for NVIDIA GPUs"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "compute capability below 9.0: no thread block clusters"
    if dtype not in TYPES:
        return f"{dtype}: it takes {' and '.join(map(str, TYPES))}"
    if gradient not in {dtype, torch.bfloat16}:
        return f"a gradient of {gradient} for logits of {dtype}"
    ctas = cluster_size(_index(device), columns, dtype)
    available = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 48 * 1024)
    if part_bytes(columns, dtype, ctas) + OWN_SHARED_MEMORY > available:
        return f"{columns} columns of {dtype} do not fit the shared memory of {ctas} CTAs"
    return _why_not_compiled(_index(device), dtype, gradient, ctas)


def grpo_rows_(
    logits: Tensor,
    ids: Tensor,
    rows: Tensor | None,
    columns: int,
    inv_temperature: float,
    tokens: Tokens,
    options: LossOptions,
    with_gradient: bool,
    others: str,
    out: Tensor | None = None,
    grad_scale: float = 1.0,
) -> Tensor:
    """CUDA implementation of `rows.grpo_rows_`; `out` has the logits' dtype, or bfloat16.

    Raises:
        ValueError: The kernel does not support these tensors.
    """
    out = logits if out is None else out
    if why := why_not(logits.device, logits.dtype, columns, out.dtype):
        raise ValueError(f"backend 'cuda' cannot be used: {why}")
    outputs = torch.zeros(len(ids), OUTPUTS, dtype=torch.float32, device=logits.device)
    visit = launch.visit(out, ids, rows, columns, others if with_gradient else "leave")
    if not visit.count or not visit.width:
        return outputs
    rollout = None if options.correction == "none" else tokens.rollout
    # A kernel takes no None: another vector stands for it, and a flag says that it is not read.
    optional = [tokens.advantage if vector is None else vector for vector in (tokens.old, tokens.ref, rollout)]
    vectors = (ids, visit.index, *optional, tokens.advantage, tokens.weight)
    arguments = [
        logits, out, *(vector.contiguous() for vector in vectors), outputs,
        logits.stride(0), out.stride(0), columns, visit.width, inv_temperature,
        *astuple(launch.scalars(options)), grad_scale,
        visit.mode, int(tokens.old is not None), int(tokens.ref is not None), int(rollout is not None),
        int(with_gradient),
    ]  # fmt: skip
    with torch.cuda.device(logits.device):
        ctas = cluster_size(_index(logits.device), columns, logits.dtype)
        kernel = _kernel(_index(logits.device), logits.dtype, out.dtype, ctas)
        bytes_each = part_bytes(columns, logits.dtype, ctas)
        # CUDA gives a CTA more than 48 KiB of shared memory only if it is asked for beforehand.
        kernel.set_shared_memory_config(bytes_each)
        with launch.named("grpo_rows_"):
            kernel(grid=(ctas * visit.count, 1, 1), block=(THREADS, 1, 1), args=arguments, shared_mem=bytes_each)
    return outputs


def kernel_source(ctas: int) -> str:
    """CUDA source for clusters of `ctas` CTAs, which includes a header of `SOURCES`."""
    return f"#define CTAS {ctas}\n" + (SOURCES / "grpo_rows.cu").read_text()


def kernel_name(logits: torch.dtype, out: torch.dtype) -> str:
    """Name of the kernel for these dtypes, as a C++ expression."""
    return f"grpo_rows<{TYPES[logits]}, {TYPES[out]}>"


@contextmanager
def some_toolkit() -> Iterator[None]:
    """Gives torch a dummy path when no CUDA toolkit is installed, as it refuses to compile without any."""
    # Imported late, because it imports setuptools.
    from torch.utils import cpp_extension

    before = cpp_extension.CUDA_HOME
    cpp_extension.CUDA_HOME = before or str(SOURCES)
    try:
        yield
    finally:
        cpp_extension.CUDA_HOME = before


@cache
def _kernel(device: int, logits: torch.dtype, out: torch.dtype, ctas: int) -> Any:
    source, name = kernel_source(ctas), kernel_name(logits, out)
    with torch.cuda.device(device), some_toolkit():
        return torch.cuda._compile_kernel(source, name, cuda_include_dirs=[str(SOURCES)])


@cache
def _why_not_compiled(device: int, dtype: torch.dtype, gradient: torch.dtype, ctas: int) -> str:
    try:
        _kernel(device, dtype, gradient, ctas)
    except Exception as error:
        # A private function may raise anything; the reason is returned, and Triton is used instead.
        return f"torch.cuda._compile_kernel: {type(error).__name__}: {error}"
    return ""


@cache
def cluster_size(device: int, columns: int, dtype: torch.dtype) -> int:
    """CTAs of a cluster: the smallest size of which `AT_ONCE` fit the memory of a multiprocessor, else the largest."""
    shared = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    fitting = (n for n in CLUSTERS if AT_ONCE * (part_bytes(columns, dtype, n) + OWN_SHARED_MEMORY) <= shared)
    return next(fitting, CLUSTERS[-1])


def part_bytes(columns: int, dtype: torch.dtype, ctas: int) -> int:
    """Bytes of shared memory for a CTA's columns; `columns_each` in `csrc/row_math.cuh`."""
    lane = 16 // dtype.itemsize
    return (columns + lane - 1 + ctas * lane - 1) // (ctas * lane) * 16


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
