"""The ways of an update's weights from a group of ranks to their SGLang engine; `rollout.sglang.transport` chooses.

All have one interface, and all requests to the engine go through `ask`, whose limit is `rollout.sglang.answer_seconds`:
an engine that dies, or never takes what it is sent, is lost and does not keep the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

Bucket = Sequence[tuple[str, torch.Tensor]]
Described = list[tuple[str, tuple[int, ...], str]]
"""Name, shape and dtype of the tensors that follow each other in a flat one."""
Ask = Callable[..., Any]
"""The answer of this rank's engine to a request, see `EngineProcess.ask`."""

DEVICE = 6
"""Place of the device among the arguments of torch's `rebuild_cuda_tensor`."""


class Shared:
    """Engine and ranks share devices: each rank hands its engine rank a handle of its bucket, on a CPU the bytes.

    Each rank of the engine gets what the rank at its place has, so buckets of an engine's ranks may differ.
    """

    own_experts = True

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def begin(self) -> None:
        """Opens an update; on the rank that owns the engine, as all but `outgoing`."""
        self._ask("begin_update")

    def outgoing(self, bucket: Bucket) -> Any:
        """What this rank contributes, for the owner; on every rank."""
        flat, described = flattened(bucket)
        return _shared(flat), described

    def push(self, outgoing: list[Any]) -> None:
        """Sends a bucket; `outgoing` is what the engine's ranks contribute."""
        self._ask("push", parts=outgoing)

    def end(self) -> None:
        """Closes the update."""
        self._ask("end_update")


def flattened(bucket: Bucket) -> tuple[torch.Tensor, Described]:
    """All tensors as one of bytes, and what it holds; the longest elements come first, so that all are aligned."""
    ordered = sorted(bucket, key=lambda pair: -pair[1].dtype.itemsize)
    described = [(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in ordered]
    parts = [tensor.detach().flatten().view(torch.uint8) for _, tensor in ordered]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8), described


def _shared(flat: torch.Tensor) -> Any:
    """A [bytes] tensor for another process: its bytes, or on CUDA a handle that its engine opens.

    The memory must not be used again before the engine has answered. A device is named by its UUID, because the engine
    may number devices otherwise; SGLang's processes understand that (sglang.srt.utils.patch_torch).
    """
    if flat.device.type == "cpu":
        return flat.numpy().tobytes()
    rebuild, arguments = reduce_tensor(flat)
    uuid = str(torch.cuda.get_device_properties(flat.device).uuid)
    return rebuild, (*arguments[:DEVICE], uuid, *arguments[DEVICE + 1 :])
