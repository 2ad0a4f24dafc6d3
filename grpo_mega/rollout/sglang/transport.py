"""Transports of weights from a group of ranks to their SGLang engine, chosen by `rollout.sglang.transport`.

With every transport a rank of an engine gets only the routed experts that it holds.

All have one interface, and all requests to the engine go through `ask`, whose time limit is
`rollout.sglang.answer_seconds`: an engine that dies, or never receives its weights, counts as lost and does not block
the trainer. For the disk the limit is `rollout.sglang.timeouts.engine_loading`.
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
from grpo_mega.rollout.sglang.payload import Described
from grpo_mega.rollout.sglang.process import EngineLost
from grpo_mega.weights.directory import Writer

Bucket = Sequence[tuple[str, torch.Tensor]]
Ask = Callable[..., Any]
"""Sends a request to this rank's engine and returns the answer, see `EngineProcess.ask`."""

DEVICE = 6
"""Index of the device among the arguments of torch's `rebuild_cuda_tensor`."""


class Transport:
    """Interface of a transport. Every rank of an engine has one; methods are called by the owner only unless noted.

    Attributes:
        experts_of: Routed experts that this rank is to push; None for all of them.
    """

    def __init__(self, ask: Ask, owner: bool, experts_of: range | None) -> None:
        """`ask` reaches the engine on the rank that is its `owner`."""
        self._ask, self._owner = ask, owner
        self.experts_of = experts_of

    def opened(self) -> Any:
        """Called after the engine's start; returns the address at which its ranks can connect to it."""

    def connect(self, address: Any) -> None:
        """Connects to the engine at the address returned by `opened`; called on every rank."""

    def close(self) -> None:
        """Closes the connection to an engine that is about to end; called on every rank."""

    def begin(self) -> None:
        """Opens an update."""
        self._ask("begin_update")

    @contextmanager
    def offered(self, bucket: Bucket) -> Iterator[Any]:
        """Yields a description of this rank's bucket for the owner, valid until the body ends; called on every rank."""
        yield None

    def push(self, bucket: Bucket, offers: list[Any]) -> None:
        """Pushes a bucket; `offers` are the descriptions from all ranks of the engine; called on every rank."""
        raise NotImplementedError

    def complete(self) -> None:
        """Called after all buckets were pushed; for every engine of the job before the first `end`."""

    def end(self) -> None:
        """Closes the update."""
        self._ask("end_update")


class Shared(Transport):
    """Transport to engines on the trainer's devices: passes handles of the buckets, or on a CPU their bytes."""

    @contextmanager
    def offered(self, bucket: Bucket) -> Iterator[Any]:
        """Yields a handle of the bytes, or on a CPU the bytes themselves, and their `described` tensors."""
        # A CUDA handle alone does not keep the memory alive: this variable does, until the body of the context ends.
        flat = flattened(bucket)
        yield _shared(flat), described(bucket)

    def push(self, bucket: Bucket, offers: list[Any]) -> None:
        """Sends the offers; the engine has copied the bytes when it answers."""
        if self._owner:
            self._ask("push", parts=offers)


class Network(Transport):
    """Transport to engines on separate devices: all ranks send their buckets to their engine ranks at once.

    The process group has the trainer's ranks, followed by those of the engine. The trainer's part runs in a thread,
    because the engine may never do its part: then the engine is lost and the group aborted, which ends the transfer.
    """

    def __init__(
        self, ask: Ask, experts_of: range | None, platform: Platform, engine_rank: int, ranks: int, seconds: float
    ) -> None:
        """This rank is `engine_rank` of the engine's `ranks`; the engine answers within `seconds`, or is lost."""
        super().__init__(ask, engine_rank == 0, experts_of)
        self._device, self._backend = platform.device, platform.backend
        self._engine_rank, self._ranks, self._seconds = engine_rank, ranks, seconds
        # Longer than the time after which the engine counts as lost and the group is aborted: a timeout of NCCL itself
        # would end this process.
        self._timeout = timedelta(seconds=2 * seconds)
        self._connections = 0
        self._name = ""
        self._store: dist.Store | None = None
        self._group: dist.ProcessGroup | None = None

    def opened(self) -> dict[str, Any]:
        """Store of a new process group: a group with an engine that has ended cannot be used again."""
        self._connections += 1
        address = own_address()
        # Listens on this address only; by default torch listens on all interfaces, without authentication.
        listening = socket.create_server((address, 0), backlog=1024)
        port = listening.getsockname()[1]
        self._store = dist.TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout,
            # `detach` hands the descriptor over: the store closes it, and Python's socket object must not as well.
            master_listen_fd=listening.detach(),
        )
        return {"address": address, "port": port, "group": f"weights-{self._connections}"}

    def connect(self, address: dict[str, Any]) -> None:
        """Joins the process group at this address, as the engine's ranks do."""
        self.close()
        self._name, host, port = address["group"], address["address"], address["port"]
        store = self._store if self._owner else dist.TCPStore(host, port, is_master=False, timeout=self._timeout)
        assert store, "it was opened"
        sizes = {"first": self._ranks, "ranks": 2 * self._ranks, "backend": self._backend}
        self._together(lambda: self._join(store), "join", **address, **sizes)

    def push(self, bucket: Bucket, offers: list[Any]) -> None:
        """Sends the bytes; the engine has received them when it answers."""
        # torch takes None for the job's default group, and would send the weights to a rank of the trainer.
        if not (group := self._group):
            raise EngineLost("the connection to the engine was closed, and the engine was not restarted")
        flat = flattened(bucket)
        self._together(lambda: self._send(flat, group), "receive", group=self._name, tensors=offers)

    @contextmanager
    def offered(self, bucket: Bucket) -> Iterator[Described]:
        """Yields the `described` tensors that this rank will send."""
        yield described(bucket)

    def _join(self, store: dist.Store) -> None:
        """Creates the group in addition to the job's, as SGLang does on its side (`init_custom_process_group`).

        `dist.new_group` cannot: its members must belong to the default group, and the engine's ranks have another one.
        """
        # The type of a group's name is not `str` in some releases of torch.
        name: Any = self._name
        # A given name does not advance torch's counter of default names, which must be equal on all ranks.
        self._group, _ = distributed_c10d._new_process_group_helper(
            2 * self._ranks,
            self._engine_rank,
            [],
            dist.Backend(self._backend),
            dist.PrefixStore(self._name, store),
            name,
            timeout=self._timeout,
        )
        assert self._group, "this rank is in it"
        # `dist.send` translates ranks of the job to those of the group by this table, which the helper does not fill.
        distributed_c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(2 * self._ranks)}

    def _send(self, flat: torch.Tensor, group: dist.ProcessGroup) -> None:
        if self._device.type == "cuda":
            # The current device belongs to the thread, and a new thread starts with device 0.
            torch.cuda.set_device(self._device)
        if len(flat):
            dist.send(flat, dst=self._ranks + self._engine_rank, group=group)
        if self._device.type == "cuda":
            # NCCL has only enqueued the transfer, and `_together` takes the end of this thread for its end.
            torch.cuda.current_stream().synchronize()

    def _together(self, work: Callable[[], None], method: str, **arguments: Any) -> None:
        """Runs `work` while the engine does its part, at the owner's request.

        Raises:
            EngineError: The engine refused.
            EngineLost: The engine did not answer, or `work` failed or did not end in time.
        """
        failures: list[Exception] = []
        thread = Thread(target=_try, args=(work, failures), daemon=True)
        thread.start()
        try:
            if self._owner:
                self._ask(method, **arguments)
        except EngineError:
            # The engine will not do its part now: aborting the group ends the thread, which waits for it.
            self.close()
            raise
        # Only the owner has heard from the engine, so the others rely on this limit alone.
        thread.join(self._seconds)
        if failures or thread.is_alive():
            self.close()
            why = failures[0] if failures else f"no end within {self._seconds:g} s"
            raise EngineLost(
                f"{method}: the transfer between the trainer and rank {self._engine_rank} of an engine failed: {why}"
            )

    def close(self) -> None:
        """Aborts the group: an orderly end would need the engine's ranks."""
        if self._group:
            distributed_c10d._abort_process_group(self._group)
        self._group = None


class Disk(Transport):
    """Transport by a Hugging Face directory visible to all nodes: the first engine's owner writes, all engines read.

    Works wherever the engines are; needs disk space for one copy of the weights, and the time to write and read them.
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
        """One rank of the job `writes` into `folder`, which only this run uses; only that rank is to push experts.

        `config` is the config.json; `experts` has the experts that each rank of the engine reads, None for all.
        """
        # Only the writer needs experts, and all of them: the other ranks would drop what they are sent.
        super().__init__(ask, owner, experts_of=None if writes else range(0))
        self._folder, self._config, self._writes = folder, config, writes
        self._experts = [numbers and [numbers.start, numbers.stop] for numbers in experts]
        self._updates = 0
        self._writer: Writer | None = None

    def begin(self) -> None:
        """Removes the directory of the last update, which all engines have read or will never read."""
        # A new name for every update, because a network file system may still show another node the old files of the
        # old name. Every owner counts, since `end` names the directory to its engine.
        self._updates += 1
        if self._writes:
            # After an interrupted update this removes the unfinished directory; after a complete one it does nothing.
            if self._writer:
                self._writer.discard()
            self._writer = Writer(self._path, self._config)
            shutil.rmtree(self._folder, ignore_errors=True)
            _written(self._writer.begin)

    def push(self, bucket: Bucket, offers: list[Any]) -> None:
        """Writes a bucket to a file."""
        if writer := self._writer:
            _written(lambda: writer.add(bucket))

    def complete(self) -> None:
        """Completes the directory by giving it its final name."""
        if self._writer:
            _written(self._writer.finish)

    def end(self) -> None:
        """Makes the engine read the directory."""
        self._ask("load", folder=str(self._path), experts=self._experts)

    @property
    def _path(self) -> Path:
        return self._folder / f"update-{self._updates}"


def _try(work: Callable[[], None], failures: list[Exception]) -> None:
    """Runs `work`; appends its exception to `failures`."""
    try:
        work()
    except Exception as error:
        failures.append(error)


def _written(work: Callable[[], None]) -> None:
    """Runs `work`; turns disk errors into an EngineError, which is raised on all ranks."""
    try:
        work()
    except (OSError, ValueError) as error:
        raise EngineError(f"weights cannot be written: {error}; make room, or set rollout.sglang.transport") from error


def described(bucket: Bucket) -> Described:
    """Name, shape and dtype of the tensors in `flattened(bucket)`."""
    return [(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in _aligned(bucket)]


def flattened(bucket: Bucket) -> torch.Tensor:
    """All tensors of a bucket as one tensor of bytes, [bytes] uint8."""
    parts = [tensor.detach().flatten().view(torch.uint8) for _, tensor in _aligned(bucket)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _aligned(bucket: Bucket) -> Bucket:
    """The bucket sorted by decreasing element size, so that each tensor begins at a multiple of its element size."""
    return sorted(bucket, key=lambda pair: -pair[1].dtype.itemsize)


def _shared(flat: torch.Tensor) -> Any:
    """A [bytes] tensor in a form that pickles for another process: its bytes, or on CUDA a handle to open there.

    The memory must not be reused before the engine has answered. A device is named by its UUID, because the engine may
    number devices differently; SGLang's processes accept that (sglang.srt.utils.patch_torch).
    """
    if flat.device.type == "cpu":
        return flat.numpy().tobytes()
    rebuild, arguments = reduce_tensor(flat)
    uuid = str(torch.cuda.get_device_properties(flat.device).uuid)
    return rebuild, (*arguments[:DEVICE], uuid, *arguments[DEVICE + 1 :])
