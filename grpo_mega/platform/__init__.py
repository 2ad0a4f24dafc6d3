"""Chooses between CUDA with NCCL and a CPU with gloo; no other package depends on the choice.

Call `start()` before anything imports megatron.core: on a machine without CUDA it applies the substitutions of
`cpu.py`, on CUDA without Transformer Engine two of them; on CUDA with it, it changes nothing in any library.

torch is imported inside the functions that need it, so that programs that only write files (`files.py`) start fast.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
import warnings
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Platform:
    """The device and back end of this process.

    Attributes:
        device: Device of weights and activations.
        backend: torch.distributed backend.
        transformer_engine: Whether Megatron's layers come from Transformer Engine.
    """

    device: torch.device
    backend: str
    transformer_engine: bool


def start() -> Platform:
    """Chooses the platform and prepares torch for it. Call once, before megatron.core is imported.

    Raises:
        InputError: There is a GPU, and the installed Transformer Engine cannot be used.
    """
    import torch

    from grpo_mega.platform import cpu
    from grpo_mega.platform.transformer_engine import usable_transformer_engine

    # Optional accelerators are reported once, in summary.json and by tools, not by every module of Megatron.
    warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex).*(not installed|Falling back)")
    # Megatron's tensor parallelism relies on kernels being launched in the order of queueing; CUDA reads this once.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        transformer_engine = usable_transformer_engine()
        cpu.install(transformer_engine=transformer_engine)
        return Platform(device, "nccl", transformer_engine)
    cpu.install()
    # One thread unless the user says otherwise: several ranks usually share the machine's cores.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    # On a CPU equal runs must give equal bits, so an operation without a deterministic implementation is an error. This
    # call, unlike use_deterministic_algorithms(), does not import the compiler, which takes seconds.
    torch.set_deterministic_debug_mode("error")
    # Filling fresh memory with NaN only helps to find reads of it, and costs two percent of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return Platform(torch.device("cpu"), "gloo", transformer_engine=False)


@cache
def start_planning() -> None:
    """Prepares torch for models with shapes but without memory (meta device); call it instead of `start`.

    Raises:
        RuntimeError: A GPU is visible, and Megatron would allocate there.
    """
    import torch

    # torch warns on machines with a CUDA toolkit and no GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    if start().backend != "gloo":
        raise RuntimeError("planning needs no GPU and must not see one; set CUDA_VISIBLE_DEVICES= before torch starts")
    # Megatron allocates buffers on the current device; on the meta device they have shapes but no memory.
    torch.cuda.current_device = lambda: torch.device("meta")  # type: ignore[assignment,return-value]


def pretend_rank(rank: int, world_size: int) -> Platform:
    """Makes this process rank `rank` of `world_size`, without the others, to build that rank's part of a model."""
    import torch
    import torch.distributed as dist

    # torch has no public backend that completes collectives without other ranks.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    return Platform(torch.device("meta"), "fake", transformer_engine=False)


def join_processes(platform: Platform, timeout_seconds: int = 1800) -> None:
    """Joins the job torchrun started; a lone process without torchrun becomes a job of one.

    A collective that takes longer than `timeout_seconds` ends the process; NCCL's own limit would be 600 s. Over gloo,
    ranks of one machine exchange over its loopback interface; no other process can connect to a lone one.
    """
    import torch.distributed as dist

    alone = "WORLD_SIZE" not in os.environ
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
        os.environ.setdefault(name, value)
    size = int(os.environ["WORLD_SIZE"])
    # By default gloo binds to the address of the host name, which other machines may be able to reach.
    if os.environ.get("LOCAL_WORLD_SIZE", "1") == str(size) and os.path.exists("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = timedelta(seconds=timeout_seconds)
    if alone:
        # A lone process needs no TCP store: one in memory opens no port to which others could connect.
        dist.init_process_group(platform.backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(platform.backend, timeout=timeout)


def refuse(message: str) -> NoReturn:
    """Ends a tool whose settings cannot work, with exit code 2; all ranks call it, and rank 0 prints the message."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        print(message, file=sys.stderr)
    # torchrun sends SIGTERM to the other ranks as soon as one has ended; all must reach the barrier and exit with the
    # same code.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(2)


def record_collectives(folder: Path) -> None:
    """Makes torch record NCCL's last collectives, and write them into `folder` when one times out.

    Call it before `join_processes`. The user's own settings are kept.
    """
    # Each pair has the name since torch 2.9 and the one before. torch appends the rank to the file name.
    values = {
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "2000",
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"): str(folder.absolute() / "nccl-rank-"),
    }
    # Both names are set, as the installed torch reads only one of them, unless the user has set either.
    for names, value in values.items():
        if not any(name in os.environ for name in names):
            os.environ |= dict.fromkeys(names, value)
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def memory_gb(platform: Platform) -> dict[str, float]:
    """Memory of this process in 10^9 bytes: resident, and with CUDA torch's allocator on the device."""
    import torch

    # The second number of statm is the resident memory, in pages.
    with open("/proc/self/statm", "rb") as file:
        held = {"resident GB": int(file.read().split()[1]) * resource.getpagesize() / 1e9}
    if platform.device.type == "cuda":
        held["allocated GB"] = torch.cuda.memory_allocated(platform.device) / 1e9
        held["reserved GB"] = torch.cuda.memory_reserved(platform.device) / 1e9
    return held


def peak_memory_bytes(platform: Platform) -> int:
    """Peak memory of this process in bytes: on the device with CUDA, resident memory without."""
    import torch

    if platform.device.type == "cuda":
        return torch.cuda.max_memory_allocated(platform.device)
    # Linux reports ru_maxrss in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
