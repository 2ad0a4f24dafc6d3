"""Reads the null GPU's counts, and finds where the host waits for it."""

from __future__ import annotations

import ctypes
import resource
import sys
from collections import Counter
from dataclasses import asdict, dataclass, fields
from types import FrameType

LEVELS = {"pinned", "pinned_peak", "used", "peak"}
"""Counts that are levels; the others count events since the process began."""
FRAMES = 3
"""Number of callers that name the place of a wait."""
HIDDEN = ("/grpo_mega/forecast/rehearsal/", "/site-packages/torch/")
LIBRARIES, PROJECT = "/site-packages/", ("grpo_mega/", "grpo_kernels/")


@dataclass(frozen=True)
class Books:
    """Counts of the null GPU, in the order of `Books` in nullgpu/books.h, which explains them."""

    launches: int
    gemms: int
    flops: int
    waits: int
    to_device: int
    to_device_bytes: int
    to_device_pageable: int
    to_host: int
    to_host_bytes: int
    to_host_pageable: int
    within: int
    within_bytes: int
    mallocs: int
    frees: int
    pinned: int
    pinned_peak: int
    used: int
    peak: int

    @classmethod
    def read(cls) -> Books:
        """The counts now. Raises RuntimeError when the null GPU was not loaded before torch."""
        library = ctypes.CDLL(None)
        if not hasattr(library, "nullgpu_books"):
            raise RuntimeError("the null GPU is not loaded: start this with tools/rehearse.py, which preloads it")
        numbers = (ctypes.c_uint64 * len(fields(cls)))()
        library.nullgpu_books(numbers)
        return cls(*numbers)

    def since(self, before: Books) -> dict[str, int]:
        """{name: events since `before`, or level now}"""
        then = asdict(before)
        return {name: n if name in LEVELS else n - then[name] for name, n in asdict(self).items()}


def host_bytes() -> int:
    """Address space of this process without the GPU's: what tensors on the host take, touched or not."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize() - Books.read().used


class Waits:
    """Counts where the host waits: the innermost places outside torch.

    Attributes:
        places: "file:line function < its caller < caller of that" -> waits.
    """

    def __init__(self) -> None:
        self.places: Counter[str] = Counter()
        # Kept as an attribute: the null GPU has its address, and would call freed memory once it is collected.
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._waited)
        ctypes.CDLL(None).nullgpu_on_wait(self._call)

    def taken(self) -> dict[str, int]:
        """The places since the last call, most waits first."""
        places, self.places = self.places, Counter()
        return dict(places.most_common())

    def _waited(self, _: int) -> None:
        # The innermost callers outside torch and the rehearsal.
        named: list[str] = []
        frame: FrameType | None = sys._getframe()
        while frame and len(named) < FRAMES:
            if words := frame_in_words(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name):
                named.append(words)
            frame = frame.f_back
        self.places[" < ".join(named) or "torch's autograd"] += 1


def frame_in_words(path: str, line: int | None, function: str) -> str:
    """ "file:line function" of this project or a library; "" for torch, Python itself and the rehearsal."""
    if any(part in path for part in HIDDEN):
        return ""
    if LIBRARIES in path:
        return f"{path.rsplit(LIBRARIES)[-1]}:{line} {function}"
    top = next((top for top in PROJECT if f"/{top}" in path), None)
    return f"{top}{path.rsplit(f'/{top}')[-1]}:{line} {function}" if top else ""
