"""The ways of an update's weights from a group of ranks to their SGLang engine; `rollout.sglang.transport` chooses.

All have one interface, and all requests to the engine go through `ask`, whose limit is `rollout.sglang.answer_seconds`:
an engine that dies, or never takes what it is sent, is lost and does not keep the trainer. By disk the limit is
`rollout.sglang.timeouts.engine_loading`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.multiprocessing.reductions import reduce_tensor

from grpo_mega.checkpoint.huggingface.directory import Writer
from grpo_mega.platform import Platform
from grpo_mega.rollout.contract import EngineError
from grpo_mega.rollout.sglang_arguments import own_address

Bucket = Sequence[tuple[str, torch.Tensor]]
Described = list[tuple[str, tuple[int, ...], str]]
"""Name, shape and dtype of the tensors that follow each other in a flat one."""
Ask = Callable[..., Any]
"""The answer of this rank's engine to a request, see `EngineProcess.ask`."""

DEVICE = 6
"""Place of the device among the arguments of torch's `rebuild_cuda_tensor`."""


class Transport:
    """What all ways have in common. Only the rank that owns an engine calls the methods, `offered` aside.

    Attributes:
        own_experts: Whether every rank of an engine gets a bucket of its own, that of the trainer's rank at its place.
    """

    own_experts = False

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def connect(self) -> None:
        """The engine was started."""

    def begin(self) -> None:
        """Opens an update."""
        self._ask("begin_update")

    @contextmanager
    def offered(self, bucket: Bucket) -> Iterator[Any]:
        """What a rank contributes to the bucket that its owner pushes, until the body ends; on every rank."""
        yield None

    def push(self, bucket: Bucket, offers: list[Any]) -> None:
        """Sends a bucket; `offers` is what the engine's ranks contribute."""
        raise NotImplementedError

    def complete(self) -> None:
        """All buckets were pushed; for every engine of the job before the first `end`."""

    def end(self) -> None:
        """Closes the update."""
        self._ask("end_update")


class Shared(Transport):
    """For engines on the trainer's devices: a rank hands its engine rank a handle of the bucket, on a CPU the bytes."""

    own_experts = True

    @contextmanager
    def offered(self, bucket: Bucket) -> Iterator[Any]:
        """Where the bytes lie, or they themselves, and what they are."""
        flat, described = flattened(bucket)
        yield _shared(flat), described

    def push(self, bucket: Bucket, offers: list[Any]) -> None:
        """The engine has copied the bytes when it answers."""
        self._ask("push", parts=offers)


class Broadcast(Transport):
    """For engines on devices of their own: the owner broadcasts, in a process group with the ranks of its engine.

    Our part of a collective goes on in a thread, because the engine may never come to its part. The engine's answer is
    waited for, and when there is none the engine is ended and the group given up, which ends the thread's work, too.
    """

    def __init__(self, ask: Ask, platform: Platform, engine_ranks: int, seconds: float) -> None:
        """The engine answers within `seconds`, or is lost."""
        super().__init__(ask)
        self._device, self._backend = platform.device, platform.backend
        self._ranks, self._seconds = engine_ranks + 1, seconds
        self._connections = 0
        self._group: dist.ProcessGroup | None = None

    def connect(self) -> None:
        """Makes a new process group: in one with an engine that is gone nothing can be sent."""
        self._group = None
        self._connections += 1
        timeout = timedelta(seconds=2 * self._seconds)  # first the engine is lost: NCCL would end this process
        store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        place = {"address": own_address(), "port": store.port, "ranks": self._ranks, "backend": self._backend}
        self._together(lambda: self._join(store, timeout), "join", group=self._name, **place)

    def push(self, bucket: Bucket, offers: list[Any]) -> None:
        """Sends it to all ranks of the engine."""
        flat, described = flattened(bucket)
        self._together(lambda: self._send(flat), "receive", group=self._name, tensors=described)

    @property
    def _name(self) -> str:
        return f"weights-{self._connections}"

    def _join(self, store: dist.Store, timeout: timedelta) -> None:
        """As SGLang does it on its side (`init_custom_process_group`): a group beside those of our own job."""
        name: Any = self._name  # a type of its own in some releases
        # It is given, so that names which torch counts out stay the same on all ranks.
        self._group, _ = distributed_c10d._new_process_group_helper(
            self._ranks,
            0,
            [],
            dist.Backend(self._backend),
            dist.PrefixStore(self._name, store),
            name,
            timeout=timeout,
        )
        assert self._group, "rank 0 is in it"
        distributed_c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(self._ranks)}

    def _send(self, flat: torch.Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread starts on the first one
        dist.broadcast(flat, src=0, group=self._group)

    def _together(self, work: Callable[[], None], method: str, **arguments: Any) -> None:
        """Does `work` while the engine does its part.

        Raises:
            EngineError: One of them failed.
        """
        failures: list[Exception] = []
        thread = Thread(target=_tried, args=(work, failures), daemon=True)
        thread.start()
        try:
            self._ask(method, **arguments)
        except EngineError:
            if self._group:
                self._group.abort()
            raise
        thread.join(self._seconds)
        if failures or thread.is_alive():
            raise EngineError(f"{method}: the engine has done its part, and ours failed: {[*failures, 'no end']}")


class Disk(Transport):
    """Through a Hugging Face directory that all nodes see: the first engine's owner writes, all engines read.

    Works wherever the engines are; takes room for one copy of the weights, and the time to write and read them.
    """

    def __init__(self, ask: Ask, folder: Path, config: dict[str, Any], writes: bool) -> None:
        """`config` is the config.json; of all owners one `writes` into `folder`, which is ours alone."""
        super().__init__(ask)
        self._folder, self._config, self._writes = folder, config, writes
        self._updates = 0
        self._writer: Writer | None = None

    def begin(self) -> None:
        """Removes what was written before, which all engines have read or will never read."""
        self._updates += 1  # another name every time: file systems of several nodes may remember files
        if self._writes:
            self._writer = Writer(self._path, self._config)
            shutil.rmtree(self._folder, ignore_errors=True)
            _written(self._writer.begin)

    def push(self, bucket: Bucket, offers: list[Any]) -> None:
        """Writes a file."""
        if writer := self._writer:
            _written(lambda: writer.add(bucket))

    def complete(self) -> None:
        """Now the directory has its name."""
        if self._writer:
            _written(self._writer.finish)

    def end(self) -> None:
        """The engine reads it."""
        self._ask("load", path=str(self._path))

    @property
    def _path(self) -> Path:
        return self._folder / f"update-{self._updates}"


def _tried(work: Callable[[], None], failures: list[Exception]) -> None:
    try:
        work()
    except Exception as error:
        failures.append(error)


def _written(work: Callable[[], None]) -> None:
    """Raises an EngineError, which all ranks get to see, when the disk fails."""
    try:
        work()
    except OSError as error:
        raise EngineError(f"weights cannot be written: {error}; make room, or set rollout.sglang.transport") from error


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
