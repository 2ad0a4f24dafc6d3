"""The trainer leaves the device and comes back in place: weights, gradients, optimizer and reference policy.

What lies on the device is a set of storages, and everything else is a view of them: always the gradients of Megatron's
gradient buffers, and with the distributed optimizer the parameters of its parameter buffers. A storage is copied to the
host, shrunk to nothing, and later grown and filled again, so every view stays a view. Megatron's own helpers are
used where they do that, for gradients: for parameters they cover the distributed optimizer only, and for the optimizer
they make new tensors, which cuts it off from the buffers.

Process groups give back what NCCL can (`platform/process_groups.py`), last of all and in place, too. What CUDA itself
holds stays. torch_memory_saver would add nothing here: it frees what is freed here, at addresses that stay, which only
captured graphs need, and it must be loaded before everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NoReturn, cast

import torch
from megatron.core.optimizer import MegatronOptimizer

from grpo_mega.models.chunks import ModelChunks
from grpo_mega.models.policy import Policy
from grpo_mega.models.reference import ReferencePolicy
from grpo_mega.platform import process_groups


class Offloaded(RuntimeError):
    """The policy was used while its memory is on the host."""


class TrainerMemory:
    """Takes a policy and its reference off the device and brings them back, bit for bit.

    The host memory of one trip is kept for the next, because pinning it is slow.
    """

    def __init__(
        self, policy: Policy, reference: ReferencePolicy | None = None, suspend_process_groups: bool = True
    ) -> None:
        """With `suspend_process_groups` nothing can be sent over NCCL while all is on the host."""
        self._policy = policy
        self._reference = reference
        self._suspends = suspend_process_groups
        self._suspended: list[Any] = []
        self._real: tuple[Any, Any, Any] | None = None
        self._freed: list[torch.UntypedStorage] = []
        self._staying: list[torch.UntypedStorage] = []
        self._host: dict[int, torch.Tensor] = {}

    def held(self) -> dict[str, int]:
        """Bytes on the device of "weights", "optimizer", "reference" and "gradients"; 0 for what is offloaded."""
        if self._real:
            nothing = dict.fromkeys(("weights", "optimizer", "reference", "gradients"), 0)
            return nothing | {"weights": sum(s.nbytes() for s in self._staying)}
        held = {kind: sum(s.nbytes() for s in storages) for kind, storages in self._storages().items()}
        buffers = (b for chunk in self._policy.ddp_chunks for b in chunk.buffers + chunk.expert_parallel_buffers)
        return held | {"gradients": sum(buffer.grad_data.nbytes for buffer in buffers)}

    @property
    def away(self) -> bool:
        """Whether anything is on the host."""
        return self._real is not None

    def offload(self, keep_weights: bool = False) -> None:
        """Moves everything to the host, between two updates; with `keep_weights` all but the weights, or then the rest.

        Gradients are dropped: the last update has used them, and the next one begins with zeros. Until `onload`,
        whoever uses what is away gets an error. Process groups are suspended when the weights are away; every rank must
        make the calls, therefore.

        Raises:
            Offloaded: It is there already.
            RuntimeError: Some of the memory is not torch's to free. Everything is still where it was.
        """
        policy, stand_in = self._policy, _StandIn()
        if self._real and (keep_weights or not self._staying):
            raise Offloaded("the trainer is offloaded already: call onload before offload")
        if self._real:
            self._free(self._staying)
            self._staying = []
            policy.chunks = policy.ddp_chunks = cast(Any, stand_in)
            self._to_driver()
            return
        storages = self._storages()
        _refuse_fixed(storages)
        _drop_activations(policy.chunks)
        present = {s._cdata for s in chain(*storages.values())}
        self._host = {key: host for key, host in self._host.items() if key in present}
        staying = storages.pop("weights") if keep_weights else []
        self._free([*chain(*storages.values())])
        self._real, self._staying = (policy.chunks, policy.ddp_chunks, policy.optimizer), staying
        policy.optimizer = cast(Any, stand_in)
        if not keep_weights:
            policy.chunks = policy.ddp_chunks = cast(Any, stand_in)
        for chunk in self._real[1]:
            chunk.offload_grad_buffers()
            chunk.zero_grad_buffer = _no_gradients  # what every pass that needs them begins with
        self._to_driver()

    def _to_driver(self) -> None:
        """What is free for torch becomes free for other processes, too, and so do groups that have nothing to send."""
        device = self._policy.platform.device
        if device.type == "cuda":
            torch.cuda.ipc_collect()  # what an engine had opened, and has closed
            torch.cuda.empty_cache()
        if self._suspends and not self._staying:
            process_groups.suspend(device, self._suspended)

    def _free(self, storages: list[torch.UntypedStorage]) -> None:
        torch.cuda.synchronize()  # does nothing on a CPU (platform/cpu.py)
        # Nothing is freed before everything is copied: a host with too little memory changes nothing.
        self._host |= {s._cdata: self._copied(s) for s in storages}
        torch.cuda.synchronize()
        for storage in storages:
            storage.resize_(0)
        self._freed += storages

    def onload(self) -> None:
        """Brings everything back in place; when the device had too little memory it can be called again.

        Raises:
            RuntimeError: Nothing is offloaded.
        """
        if not self._real:
            raise RuntimeError("the trainer is on the device: call offload before onload")
        process_groups.resume(self._suspended)
        for storage in self._freed:
            host = self._host[storage._cdata]
            storage.resize_(host.nbytes)
            _as_bytes(storage).copy_(host, non_blocking=True)
        gpt, model, optimizer = self._real
        for chunk in model:
            vars(chunk).pop("zero_grad_buffer", None)
            chunk.restore_grad_buffers()  # with zeros; and waits for the copies
        self._policy.chunks, self._policy.ddp_chunks, self._policy.optimizer = gpt, model, optimizer
        self._real, self._freed, self._staying = None, [], []

    def _storages(self) -> dict[str, list[torch.UntypedStorage]]:
        """What has to be kept, by kind, each storage once: many tensors are views of the same."""
        gpt, device = self._policy.chunks, self._policy.platform.device
        kinds: dict[str, Iterable[torch.Tensor]] = {
            "weights": chain(gpt.parameters(), gpt.buffers()),
            "optimizer": _optimizer_tensors(self._policy.optimizer),
            "reference": self._reference.held if self._reference else (),
        }
        seen: set[int] = set()
        found: dict[str, list[torch.UntypedStorage]] = {kind: [] for kind in kinds}
        for kind, tensors in kinds.items():
            for storage in (t.untyped_storage() for t in tensors if t.device == device):
                if storage.nbytes() and storage._cdata not in seen:
                    seen.add(storage._cdata)
                    found[kind].append(storage)
        return found

    def _copied(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The storage's bytes, on their way to the host."""
        host = self._host.get(storage._cdata)
        if host is None or host.nbytes != storage.nbytes():
            pin = storage.device.type == "cuda"
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin)
        return host.copy_(_as_bytes(storage), non_blocking=True)


class _StandIn:
    """In place of a policy's model and optimizer while they are away: touching freed memory would end the process."""

    def __getattr__(self, name: str) -> NoReturn:
        raise Offloaded(
            f"the policy is offloaded, and somebody asks for its {name}: the engine has the device. "
            "Call TrainerMemory.onload first"
        )

    def __iter__(self) -> NoReturn:
        self.__getattr__("model")

    def __len__(self) -> NoReturn:
        self.__getattr__("model")

    def __getitem__(self, _: int) -> NoReturn:
        self.__getattr__("model")


def _no_gradients() -> NoReturn:
    raise Offloaded("the policy's gradients are offloaded, and somebody trains it. Call TrainerMemory.onload first")


def _drop_activations(gpt: ModelChunks) -> None:
    """Lets go of what modules still hold of the last micro-batch; the next one replaces it anyway."""
    for chunk in gpt:
        chunk.set_input_tensor(None)  # what the pipeline stage before has sent
    for module in gpt.modules():
        dispatcher = getattr(module, "token_dispatcher", None)
        if dispatcher is not None:  # [tokens, experts] each
            dispatcher.probs = dispatcher.routing_map = dispatcher.reversed_local_input_permutation_mapping = None


def _optimizer_tensors(optimizer: MegatronOptimizer | None) -> Iterator[torch.Tensor]:
    """Main parameters and moments; without mixed precision the former are the model's own or views of them."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer] if optimizer else []):
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value))


def _refuse_fixed(storages: dict[str, list[torch.UntypedStorage]]) -> None:
    for kind, members in storages.items():
        fixed = sum(s.nbytes() for s in members if not s.resizable())
        if fixed:
            raise RuntimeError(
                f"{fixed:,} bytes of the trainer's {kind} cannot be freed, because they belong to another library "
                "(numpy, a mapped file): put copies in their place. Nothing was offloaded"
            )


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """[bytes] all of a storage, whatever is in it; without the version counters of the tensors that view it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
