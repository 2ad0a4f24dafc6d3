"""The ways of an update's weights from a group of ranks to their SGLang engine; `rollout.sglang.transport` chooses.

By all of them each rank of an engine gets the routed experts that it keeps, and no others.

All have one interface, and all requests to the engine go through `ask`, whose limit is `rollout.sglang.answer_seconds`:
an engine that dies, or never takes what it is sent, is lost and does not keep the trainer. By disk the limit is
`rollout.sglang.timeouts.engine_loading`.
"""

from __future__ import annotations

import shutil
import socket
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

from grpo_mega.platform import Platform
from grpo_mega.rollout.contract import EngineError
from grpo_mega.rollout.sglang.arguments import own_address
from grpo_mega.rollout.sglang.process import EngineLost
from grpo_mega.weights.directory import Writer

Bucket = Sequence[tuple[str, torch.Tensor]]
Described = list[tuple[str, tuple[int, ...], str]]
"""Name, shape and dtype of the tensors that follow each other in a flat one."""
Ask = Callable[..., Any]
"""The answer of this rank's engine to a request, see `EngineProcess.ask`."""

DEVICE = 6
"""Place of the device among the arguments of torch's `rebuild_cuda_tensor`."""


class Transport:
    """What all ways have in common. Every rank of an engine has one; where it is not said, only the owner's is called.

    Attributes:
        experts_of: The routed experts that this rank is to push; None for all of them.
    """

    def __init__(self, ask: Ask, owner: bool, experts_of: range | None) -> None:
        """`ask` is for the rank that is the `owner` of the engine."""
        self._ask, self._owner = ask, owner
        self.experts_of = experts_of

    def opened(self) -> Any:
        """The engine was started: where its ranks can meet it."""

    def connect(self, where: Any) -> None:
        """Meets the engine; on every rank."""

    def close(self) -> None:
        """Leaves the engine, which is about to end; on every rank."""

    def begin(self) -> None:
        """Opens an update."""
        self._ask("begin_update")

    @contextmanager
    def offered(self, bucket: Bucket) -> Iterator[Any]:
        """What a rank tells the owner about its bucket, and keeps until the body ends; on every rank."""
        yield None

    def push(self, bucket: Bucket, offers: list[Any]) -> None:
        """Hands a bucket over; `offers` is what all ranks of the engine told; on every rank."""
        raise NotImplementedError

    def complete(self) -> None:
        """All buckets were pushed; for every engine of the job before the first `end`."""

    def end(self) -> None:
        """Closes the update."""
        self._ask("end_update")


class Shared(Transport):
    """For engines on the trainer's devices: a rank hands its engine rank a handle of the bucket, on a CPU the bytes."""

    @contextmanager
    def offered(self, bucket: Bucket) -> Iterator[Any]:
        """Where the bytes lie, or they themselves, and what they are."""
        flat = flattened(bucket)  # lives as long as this frame: a handle alone does not keep it
        yield _shared(flat), described(bucket)

    def push(self, bucket: Bucket, offers: list[Any]) -> None:
        """The engine has copied the bytes when it answers."""
        if self._owner:
            self._ask("push", parts=offers)


class Network(Transport):
    """For engines on devices of their own: each rank sends its engine rank its bucket, all of them at once.

    They do so in a process group of the ranks, followed by those of the engine. Our part runs in a thread,
    because the engine may never come to its part: then the engine is lost, and the group given up, which ends what is
    being sent, too.
    """

    def __init__(
        self, ask: Ask, experts_of: range | None, platform: Platform, place: int, ranks: int, seconds: float
    ) -> None:
        """This is the rank at `place` of `ranks`; the engine answers within `seconds`, or is lost."""
        super().__init__(ask, place == 0, experts_of)
        self._device, self._backend = platform.device, platform.backend
        self._place, self._ranks, self._seconds = place, ranks, seconds
        self._timeout = timedelta(seconds=2 * seconds)  # first the engine is lost: NCCL would end this process
        self._connections = 0
        self._name = ""
        self._store: dist.Store | None = None
        self._group: dist.ProcessGroup | None = None

    def opened(self) -> dict[str, Any]:
        """The store of a new process group: in one with an engine that is gone nothing can be sent."""
        self._connections += 1
        address = own_address()
        self._store = _store_at(address, self._timeout)
        return {"address": address, "port": self._store.port, "group": f"weights-{self._connections}"}

    def connect(self, where: dict[str, Any]) -> None:
        """Joins that group, as the engine's ranks do."""
        self.close()
        self._name, address, port = where["group"], where["address"], where["port"]
        store = self._store if self._owner else dist.TCPStore(address, port, is_master=False, timeout=self._timeout)
        assert store, "it was opened"
        sizes = {"first": self._ranks, "ranks": 2 * self._ranks, "backend": self._backend}
        self._together(lambda: self._join(store), "join", **where, **sizes)

    def push(self, bucket: Bucket, offers: list[Any]) -> None:
        """The engine has the bytes when it answers."""
        if not (group := self._group):  # torch would send through the job's own
            raise EngineLost("an engine that was given up was not started anew")
        flat = flattened(bucket)
        self._together(lambda: self._send(flat, group), "receive", group=self._name, tensors=offers)

    @contextmanager
    def offered(self, bucket: Bucket) -> Iterator[Described]:
        """What it will send."""
        yield described(bucket)

    def _join(self, store: dist.Store) -> None:
        """As SGLang does it on its side (`init_custom_process_group`): a group beside those of our own job."""
        name: Any = self._name  # a type of its own in some releases
        # It is given, so that names which torch counts out stay the same on all ranks.
        self._group, _ = distributed_c10d._new_process_group_helper(
            2 * self._ranks,
            self._place,
            [],
            dist.Backend(self._backend),
            dist.PrefixStore(self._name, store),
            name,
            timeout=self._timeout,
        )
        assert self._group, "this rank is in it"
        distributed_c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(2 * self._ranks)}

    def _send(self, flat: torch.Tensor, group: dist.ProcessGroup) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread starts on the first one
        if len(flat):
            dist.send(flat, dst=self._ranks + self._place, group=group)
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # NCCL has only begun

    def _together(self, work: Callable[[], None], method: str, **arguments: Any) -> None:
        """Does `work` while the engine does its part, for which the owner asks.

        Raises:
            EngineError: The engine refused.
            EngineLost: It did not answer, or its rank did not do its part.
        """
        failures: list[Exception] = []
        thread = Thread(target=_tried, args=(work, failures), daemon=True)
        thread.start()
        try:
            if self._owner:
                self._ask(method, **arguments)
        except EngineError:
            self.close()
            raise
        thread.join(self._seconds)
        if failures or thread.is_alive():
            self.close()
            why = failures[0] if failures else f"no end within {self._seconds:g} s"
            raise EngineLost(
                f"{method}: rank {self._place} of an engine and the trainer's did not come together: {why}"
            )

    def close(self) -> None:
        """Gives the group up: to end it as usual would take the engine's ranks."""
        if self._group:
            distributed_c10d._abort_process_group(self._group)
        self._group = None


class Disk(Transport):
    """Through a Hugging Face directory that all nodes see: the first engine's owner writes, all engines read.

    Works wherever the engines are; takes room for one copy of the weights, and the time to write and read them.
    """

    def __init__(
        self,
        ask: Ask,
        owner: bool,
        writes: bool,
        folder: Path,
        config: dict[str, Any],
        experts: Sequence[range | None],
    ) -> None:
        """Of all ranks of the job one `writes` into `folder`, which is ours alone; only that one gets routed experts.

        `config` is the config.json; `experts` are those that each rank of the engine reads, None for all.
        """
        super().__init__(ask, owner, experts_of=None if writes else range(0))
        self._folder, self._config, self._writes = folder, config, writes
        self._experts = [numbers and [numbers.start, numbers.stop] for numbers in experts]
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
        self._ask("load", folder=str(self._path), experts=self._experts)

    @property
    def _path(self) -> Path:
        return self._folder / f"update-{self._updates}"


def _store_at(address: str, timeout: timedelta) -> dist.TCPStore:
    """A store that listens at this address only; torch would listen on all interfaces, and asks nobody who they are."""
    listening = socket.create_server((address, 0), backlog=1024)
    port = listening.getsockname()[1]
    # The store closes the descriptor.
    return dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listening.detach()
    )


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


def described(bucket: Bucket) -> Described:
    """What the bytes of `flattened` are."""
    return [(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in _aligned(bucket)]


def flattened(bucket: Bucket) -> torch.Tensor:
    """All tensors as one of bytes."""
    parts = [tensor.detach().flatten().view(torch.uint8) for _, tensor in _aligned(bucket)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _aligned(bucket: Bucket) -> Bucket:
    """The longest elements first, so that each begins at a multiple of its size."""
    return sorted(bucket, key=lambda pair: -pair[1].dtype.itemsize)


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
