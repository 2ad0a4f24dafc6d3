"""Stand-in for torch_memory_saver on a CPU: `pause` frees what a region allocated, `resume` takes the memory again.

As on a GPU, what was not backed up is undefined afterwards: it is filled with 0xFF, NaN in every floating-point format,
so that weights which were not pushed again are noticed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _Recorder(TorchDispatchMode):
    """Notes the storages that factory functions allocate."""

    def __init__(self, storages: list[torch.UntypedStorage]) -> None:
        super().__init__()
        self._storages = storages

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not any(isinstance(a, torch.Tensor) for a in args):
            self._storages.append(made.untyped_storage())
        return made


class TorchMemorySaver:
    """The interface that SGLang uses."""

    hook_mode = "preload"
    enabled = True

    def __init__(self) -> None:
        self._regions: dict[str, list[tuple[list[torch.UntypedStorage], bool]]] = {}
        self._paused: dict[str, list[tuple[torch.UntypedStorage, int, torch.UntypedStorage | None]]] = {}

    @contextlib.contextmanager
    def region(self, tag: str = "default", enable_cpu_backup: bool = False, **_) -> Iterator[None]:
        storages: list[torch.UntypedStorage] = []
        with _Recorder(storages):
            yield
        self._regions.setdefault(tag, []).append((storages, enable_cpu_backup))

    @contextlib.contextmanager
    def _nothing(self, *_, **__) -> Iterator[None]:
        yield

    cuda_graph = disable = configure_subprocess = _nothing

    def pause(self, tag: str | None = None) -> None:
        for name in [tag] if tag else [*self._regions]:
            # Several tensors are views of one storage.
            alive = {s._cdata: (s, backup) for storages, backup in self._regions.get(name, []) for s in storages}
            self._paused[name] = [(s, s.nbytes(), s.clone() if b else None) for s, b in alive.values() if s.nbytes()]
            for storage, _, _ in self._paused[name]:
                storage.resize_(0)

    def resume(self, tag: str | None = None) -> None:
        for name in [tag] if tag else [*self._paused]:
            for storage, size, backup in self._paused.pop(name, []):
                storage.resize_(size)
                if backup is None:
                    torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)
                else:
                    storage.copy_(backup)


torch_memory_saver = TorchMemorySaver()


def configure_subprocess():
    return torch_memory_saver.configure_subprocess()
