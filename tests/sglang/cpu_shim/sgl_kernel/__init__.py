"""Stand-in for SGLang's compiled kernels: what a CPU without AMX calls, in torch; all else fails when it is called.

It must not declare `torch.ops.sgl_kernel.convert_weight_packed`: SGLang would take the CPU for one with AMX.
"""

import sys
from collections.abc import Callable
from typing import NoReturn

import torch

__version__ = "0.4.10"  # SGLang asks for a minimum

sys.modules[f"{__name__}.kvcacheio"] = sys.modules[__name__]  # from there releases before 0.5.13 import some


def _spans(rows: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor):
    """(row, slice of it, slice of all spans in a row) of every request."""
    behind = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        yield row, slice(start, end), slice(behind, behind + end - start)
        behind += end - start


def assign_req_to_token_pool_cpu(rows, table, starts, ends, locations, _width) -> None:
    """Writes where the new tokens of every request lie in the cache into the table of requests."""
    for row, span, packed in _spans(rows, starts, ends):
        table[row, span] = locations[packed].to(table.dtype)


def assign_extend_cache_locs_cpu(rows, table, starts, ends, locations, _width) -> None:
    """Reads it out of the table."""
    for row, span, packed in _spans(rows, starts, ends):
        locations[packed] = table[row, span].to(locations.dtype)


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_, **__) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in for CPUs")

    return missing
