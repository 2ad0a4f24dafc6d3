"""Measures each holder's memory in each phase; a device is handed over only after the memory was returned.

On a GPU it uses each process's memory by the driver (NVML), and the memory allocated and reserved by torch; elsewhere
the resident memory of each process. Engines have been seen to answer "released" before the memory is free, or to keep
some of it every time, so their answers are not trusted.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from grpo_mega.platform import trace
from grpo_mega.platform.trace import HOLDERS

Meter = Callable[[], dict[str, int]]
"""Returns the current {holder: bytes}."""

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
REMEMBERED = 40
"""Number of last entries that a ledger keeps."""
REMEDY = (
    "The device is not handed over: look for tensors, captured graphs or requests that are still alive, or restart the "
    "holder. Measured:"
)


@dataclass(frozen=True)
class LedgerEntry:
    """One entry of the ledger: {holder: bytes} at the moment named by `phase`."""

    phase: str
    held: dict[str, int]


class MemoryNotReturned(RuntimeError):
    """Less memory was returned than required; the message has each holder's memory, and the ledger's last entries."""


class Ledger:
    """Ledger of the memory measured in the last phases."""

    def __init__(self, meter: Meter) -> None:
        """`meter` is called for every entry."""
        self._meter = meter
        self.entries: deque[LedgerEntry] = deque(maxlen=REMEMBERED)
        self._least: dict[str, int] = {}

    def mark(self, phase: str) -> LedgerEntry:
        """Measures memory now and adds an entry to the ledger, and to the trace."""
        entry = LedgerEntry(phase, self._meter())
        self.entries.append(entry)
        trace.counter(HOLDERS, **{f"{holder} GB": held / 1e9 for holder, held in entry.held.items()})
        return entry

    @contextmanager
    def release(self, name: str, due: Mapping[str, int], tolerance: int, patience: float = 0.0) -> Iterator[None]:
        """Context whose body must release memory; raises at its end when that was not returned.

        Args:
            name: Name of the phase, for the ledger and the error.
            due: {holder: bytes} that each holder must release.
            tolerance: Bytes by which each holder may fall short.
            patience: Seconds to keep measuring before the error: drivers and other processes free memory late.

        Raises:
            MemoryNotReturned: A holder kept more than the tolerance.
            KeyError: `due` names a holder that is not measured.
        """
        before = self.mark(f"{name}: begin")
        _refuse_unknown(due, before)
        yield
        self._wait(lambda held: not _missing(before, held, due, tolerance), patience)
        after = self.mark(f"{name}: end")
        missing = _missing(before, after.held, due, tolerance)
        if missing:
            kept = "; ".join(f"{h} keeps {_mib(n)} of the {_mib(due[h])} MiB that were due" for h, n in missing.items())
            raise MemoryNotReturned(f"{name}: {kept} (tolerance {_mib(tolerance)} MiB). {REMEDY}\n{self.table()}")

    def at_rest(self, name: str, holder: str, tolerance: int, patience: float = 0.0) -> None:
        """Checks that a holder at rest keeps no more memory than the least it has kept at rest before.

        So even a small leak is noticed once it adds up to the tolerance.

        Args:
            name: Name of the moment, for the ledger and the error.
            holder: Holder whose memory is checked.
            tolerance: Bytes allowed above the least that it has kept so far.
            patience: Seconds to keep measuring before the error.

        Raises:
            MemoryNotReturned: The holder keeps more.
            KeyError: The holder is not measured.
        """
        least = self._least.get(holder)
        # The first time at rest sets the bound: libraries that were loaded until then stay loaded for good.
        if least is not None:
            self._wait(lambda held: held[holder] <= least + tolerance, patience)
        entry = self.mark(name)
        _refuse_unknown([holder], entry)
        kept = entry.held[holder]
        if least is None and not kept:
            logger.warning(
                "the driver lists no process of the %s, as in a container with its own process ids (docker: "
                "--pid=host): what it keeps at rest goes unnoticed",
                holder,
            )
        self._least[holder] = kept if least is None else min(least, kept)
        if kept > self._least[holder] + tolerance:
            raise MemoryNotReturned(
                f"{name}: {holder} keeps {_mib(kept)} MiB, and has kept {_mib(self._least[holder])} MiB before "
                f"(tolerance {_mib(tolerance)} MiB). {REMEDY}\n{self.table()}"
            )

    def forget(self, holder: str) -> None:
        """Forgets the memory at rest of a holder that was replaced, as the new one's is not known yet."""
        self._least.pop(holder, None)

    def _wait(self, settled: Callable[[Mapping[str, int]], bool], patience: float) -> None:
        give_up = time.monotonic() + patience
        while not settled(self._meter()) and time.monotonic() < give_up:
            time.sleep(POLL_SECONDS)

    def table(self) -> str:
        """The remembered entries in MiB, as a table with a row for each phase and a column for each holder."""
        holders = list(dict.fromkeys(holder for entry in self.entries for holder in entry.held))
        rows = [["MiB", *holders]]
        rows += [[e.phase, *(_mib(e.held[h]) if h in e.held else "-" for h in holders)] for e in self.entries]
        first, *rest = (max(map(len, column)) for column in zip(*rows, strict=True))
        return "\n".join(
            "  ".join([phase.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, rest, strict=True))])
            for phase, *cells in rows
        )


def _refuse_unknown(holders: Iterable[str], entry: LedgerEntry) -> None:
    unknown = {*holders} - entry.held.keys()
    if unknown:
        raise KeyError(f"{', '.join(sorted(unknown))}: not measured; measured are {', '.join(entry.held)}")


def _missing(before: LedgerEntry, now: Mapping[str, int], due: Mapping[str, int], tolerance: int) -> dict[str, int]:
    """{holder: bytes not returned}, for holders that fall short by more than the tolerance."""
    short = {holder: wanted - (before.held[holder] - now.get(holder, 0)) for holder, wanted in due.items()}
    return {holder: lacking for holder, lacking in short.items() if lacking > tolerance}


def _mib(number: int) -> str:
    return f"{number / 2**20:,.1f}"


def meter(device: torch.device, processes: Mapping[str, Collection[int]]) -> Meter:
    """The most precise meter for this device; `processes` gives the process ids of each holder, and may change later.

    On CUDA, it returns {holder: device bytes of its processes}, "device" for all memory in use, and torch's "allocated"
    and "reserved" of this process. Elsewhere {holder: resident bytes of its processes}.
    """
    if device.type == "cuda":
        return lambda: device_memory(device, processes) | allocator(device)
    return lambda: resident_memory(processes)


def resident_memory(processes: Mapping[str, Collection[int]]) -> dict[str, int]:
    """{holder: bytes of main memory of its processes}; a process that has ended counts as 0."""
    held = dict.fromkeys(processes, 0)
    for holder, members in processes.items():
        for process in members:
            with suppress(psutil.NoSuchProcess):
                held[holder] += psutil.Process(process).memory_info().rss
    return held


def allocator(device: torch.device) -> dict[str, int]:
    """Bytes that torch has allocated and reserved on a CUDA device, in this process."""
    return {"allocated": torch.cuda.memory_allocated(device), "reserved": torch.cuda.memory_reserved(device)}


def device_memory(device: torch.device, processes: Mapping[str, Collection[int]]) -> dict[str, int]:
    """{holder: device bytes of its processes, "device": bytes in use by any process}, from the driver.

    A process that the driver does not list counts as 0.

    Raises:
        RuntimeError: The driver cannot be asked, or does not report a process's memory.
    """
    nvml = _nvml()
    # By UUID: NVML numbers all GPUs of the machine, CUDA only the visible ones.
    handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    used = {p.pid: p.usedGpuMemory for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    held = {holder: [used.get(p, 0) for p in members] for holder, members in processes.items()}
    if any(None in numbers for numbers in held.values()):
        raise RuntimeError(
            "the driver does not say how much device memory each process holds, as under MIG or WDDM: give no "
            "processes to the ledger's meter, and let what is due come from `device`"
        )
    everybody = nvml.nvmlDeviceGetMemoryInfo(handle).used
    return {holder: sum(numbers) for holder, numbers in held.items()} | {"device": everybody}


@functools.cache
def _nvml() -> Any:
    """The driver's management library (NVML), initialised."""
    try:
        import pynvml
    except ImportError:
        raise RuntimeError("memory on a GPU is measured with NVML: pip install nvidia-ml-py") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise RuntimeError(f"NVML does not start ({error}): is the NVIDIA driver installed?") from None
    return pynvml
