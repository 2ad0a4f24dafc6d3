"""Offloads the models of training from the device and restores them in place: weights, gradients and optimizers.

The device holds a set of storages; tensors are views of them: gradients always view Megatron's gradient buffers, and
with the distributed optimizer parameters view its parameter buffers. A storage is copied to the
host, shrunk to nothing, and later grown and filled again, so every view stays a view. Megatron's own helpers are
used where they do that, for gradients: for parameters they cover the distributed optimizer only, and for the optimizer
they make new tensors, which cuts it off from the buffers.

Process groups give back what NCCL can (`platform/process_groups.py`), last of all and in place, too. What CUDA itself
holds stays. torch_memory_saver would add nothing here: it frees what is freed here, at addresses that stay, which only
captured graphs need, and it must be loaded before everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NoReturn, cast

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from grpo_mega.colocation.host_memory import HostMemory, aligned
from grpo_mega.models.chunks import ModelChunks
from grpo_mega.models.megatron.te_kernels import forget_placeholders
from grpo_mega.models.model import Model
from grpo_mega.models.reference import ReferencePolicy
from grpo_mega.platform import process_groups


class Offloaded(RuntimeError):
    """A model was used while its memory is on the host."""


@dataclass
class _OffloadedModel:
    """The parts of a model that is offloaded: the model itself has stand-ins for them meanwhile."""

    model: Model
    chunks: ModelChunks
    ddp_chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer | None


class TrainerMemory:
    """Takes models off the device and brings them back, bit for bit.

    The host memory of one trip is kept for the next, because pinning it is slow.
    """

    def __init__(self, models: Sequence[Model | ReferencePolicy], suspend_process_groups: bool = True) -> None:
        """Models of different roles; the first one's weights are what engines are sent, and may leave later.

        With `suspend_process_groups` nothing can be sent over NCCL while all is on the host.

        Raises:
            ValueError: Two of them have the same role.
        """
        roles = [model.role for model in models]
        if len({*roles}) < len(roles):
            raise ValueError(f"models of the same role: {', '.join(roles)}; give each its own role")
        self._models = [model for model in models if isinstance(model, Model)]
        self._copies = [model for model in models if isinstance(model, ReferencePolicy)]
        self._sent = f"{self._models[0].role} weights"
        self._device = self._models[0].platform.device
        self._suspends = suspend_process_groups
        self._suspended: list[Any] = []
        self._away: list[_OffloadedModel] = []
        self._freed: list[tuple[torch.UntypedStorage, list[torch.Tensor]]] = []
        self._staying: list[torch.UntypedStorage] = []
        self._host = HostMemory(pin=self._device.type == "cuda")

    def held(self) -> dict[str, int]:
        """Bytes on the device by role and kind, 0 for what is offloaded: "policy weights", "policy optimizer",
        "policy gradients", "reference weights".
        """
        if self._away:
            kinds = [f"{m.role} {kind}" for m in self._models for kind in ("weights", "optimizer", "gradients")]
            kinds += [f"{copy.role} weights" for copy in self._copies]
            return dict.fromkeys(kinds, 0) | {self._sent: sum(s.nbytes() for s in self._staying)}
        held = {kind: sum(s.nbytes() for s in storages) for kind, storages in self._storages().items()}
        for model in self._models:
            buffers = (b for chunk in model.ddp_chunks for b in chunk.buffers + chunk.expert_parallel_buffers)
            held[f"{model.role} gradients"] = sum(buffer.grad_data.nbytes for buffer in buffers)
        return held

    def leaving(self, keep_weights: bool) -> int:
        """Bytes on the device that `offload` would free now."""
        return sum(size for kind, size in self.held().items() if not (keep_weights and kind == self._sent))

    @property
    def away(self) -> bool:
        """Whether anything is on the host."""
        return bool(self._away)

    def offload(self, keep_weights: bool = False) -> None:
        """Moves everything to the host, between two updates.

        With `keep_weights` the first model's weights stay; a second call without it moves them too. Gradients are
        dropped: the last update has used them, and the next one begins with zeros. Until `onload`, any use of an
        offloaded tensor is an error. Process groups are suspended once the weights have left, so every rank must make
        the same calls.

        Raises:
            Offloaded: Everything is on the host already.
            RuntimeError: Some of the memory is not torch's to free. Nothing has moved.
        """
        if self._away and (keep_weights or not self._staying):
            raise Offloaded("the trainer is offloaded already: call onload before offload")
        if self._away:
            self._free(self._staying)
            self._staying = []
            _stand_in(self._models[0])
            self._to_driver()
            return
        storages = self._storages()
        # Before anything changes: after a refusal the trainer must be able to go on.
        for kind, members in storages.items():
            if fixed := sum(s.nbytes() for s in members if not s.resizable()):
                raise RuntimeError(
                    f"{fixed:,} bytes of the {kind} cannot be freed, because they belong to another library "
                    "(numpy, a mapped file): put copies in their place. Nothing was offloaded"
                )
        # Modules keep the last micro-batch that the previous pipeline stage sent them, until the next replaces it.
        for chunk in chain(*(model.chunks for model in self._models)):
            chunk.set_input_tensor(None)
        self._host.reserve(sum(aligned(s.nbytes()) for s in chain(*storages.values())))
        staying = storages.pop(self._sent) if keep_weights else []
        self._free([*chain(*storages.values())])
        self._staying = staying
        self._away = [_OffloadedModel(model, model.chunks, model.ddp_chunks, model.optimizer) for model in self._models]
        for model in self._models:
            _without_gradients(model)
            if not (keep_weights and model is self._models[0]):
                _stand_in(model)
        self._to_driver()

    def _to_driver(self) -> None:
        """Returns torch's free memory to the driver, for other processes, and suspends idle process groups."""
        if self._device.type == "cuda":
            forget_placeholders()
            # Buckets that the engine had mapped stay allocated until torch notices that the engine has closed them.
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
        if self._suspends and not self._staying:
            process_groups.suspend(self._device, self._suspended)

    def _free(self, storages: list[torch.UntypedStorage]) -> None:
        torch.cuda.synchronize()  # does nothing on a CPU (platform/cpu.py)
        copies = []
        for storage in storages:
            kept = self._host.take(storage.nbytes())
            for there, part in _side_by_side(storage, kept):
                part.copy_(there, non_blocking=True)
            copies.append((storage, kept))
        torch.cuda.synchronize()
        # Only now that every copy has arrived: a failure above leaves the trainer whole.
        for storage in storages:
            storage.resize_(0)
        self._freed += copies

    def onload(self) -> None:
        """Brings everything back in place; when the device had too little memory it can be called again.

        Raises:
            RuntimeError: Nothing is offloaded.
        """
        if not self._away:
            raise RuntimeError("the trainer is on the device: call offload before onload")
        process_groups.resume(self._suspended)
        for storage, kept in self._freed:
            storage.resize_(sum(len(part) for part in kept))
            for there, part in _side_by_side(storage, kept):
                there.copy_(part, non_blocking=True)
        for chunk in chain(*(away.ddp_chunks for away in self._away)):
            # The class's own method returns from behind the refusal that `_without_gradients` had put over it.
            vars(chunk).pop("zero_grad_buffer", None)
            # Makes gradients of zeros, and synchronises the device, by which the copies above have arrived.
            chunk.restore_grad_buffers()
        for away in self._away:
            away.model.chunks, away.model.ddp_chunks = away.chunks, away.ddp_chunks
            away.model.optimizer = away.optimizer
        self._away, self._freed, self._staying = [], [], []

    def _storages(self) -> dict[str, list[torch.UntypedStorage]]:
        """Storages to offload, by role and kind, each once: many tensors are views of the same."""
        kinds: dict[str, Iterable[torch.Tensor]] = {}
        for model in self._models:
            kinds[f"{model.role} weights"] = chain(model.chunks.parameters(), model.chunks.buffers())
            kinds[f"{model.role} optimizer"] = _optimizer_tensors(model.optimizer)
        kinds |= {f"{copy.role} weights": copy.held for copy in self._copies}
        seen: set[int] = set()
        storages: dict[str, list[torch.UntypedStorage]] = {kind: [] for kind in kinds}
        for kind, tensors in kinds.items():
            for storage in (t.untyped_storage() for t in tensors if t.device == self._device):
                if storage.nbytes() and storage._cdata not in seen:
                    seen.add(storage._cdata)
                    storages[kind].append(storage)
        return storages


class _Unusable:
    """Replaces the parts of an offloaded model and raises on any use: touching freed memory would end the process."""

    def __init__(self, role: str) -> None:
        self._role = role

    def __getattr__(self, name: str) -> NoReturn:
        raise Offloaded(
            f"the {self._role} is offloaded while the engine has the device, and its {name} was accessed. "
            "Call TrainerMemory.onload first"
        )

    def __iter__(self) -> NoReturn:
        self.__getattr__("model")

    def __len__(self) -> NoReturn:
        self.__getattr__("model")

    def __getitem__(self, _: int) -> NoReturn:
        self.__getattr__("model")


def _stand_in(model: Model) -> None:
    """Replaces all parts of a model by a stand-in."""
    model.chunks = model.ddp_chunks = model.optimizer = cast(Any, _Unusable(model.role))


def _without_gradients(model: Model) -> None:
    """Drops a model's gradients; weights that are still on the device can be read but not trained."""
    model.optimizer = cast(Any, _Unusable(model.role))
    for chunk in model.ddp_chunks:
        chunk.offload_grad_buffers()
        # Every pass that needs gradients begins by zeroing them.
        chunk.zero_grad_buffer = partial(_refuse_training, model.role)


def _refuse_training(role: str) -> NoReturn:
    raise Offloaded(f"the {role} cannot be trained while its gradients are offloaded. Call TrainerMemory.onload first")


def _optimizer_tensors(optimizer: MegatronOptimizer | None) -> Iterator[torch.Tensor]:
    """Main parameters and moments; without mixed precision the former are the model's own or views of them."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer] if optimizer else []):
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value))


def _side_by_side(
    storage: torch.UntypedStorage, parts: list[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(bytes of the storage, part of the host's memory that holds them), part by part."""
    # A fresh tensor over the storage: writing through it leaves the version counters of its views alone, which autograd
    # would otherwise take for a change.
    as_bytes = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return zip(as_bytes.split([len(part) for part in parts]), parts, strict=True)
