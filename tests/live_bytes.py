"""Measures the peak memory of a piece of code."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations return inside, as long as they are alive.

    Attributes:
        most: Most bytes that were alive at once.
    """

    def __init__(self):
        super().__init__()
        self.most = self._alive = 0
        self._known = set()

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        result = operation(*arguments, **(options or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        self.most = max(self.most, self._alive)
        return result

    def _add(self, storage):
        # A storage has one Python object as long as it lives, shared by all tensors that view it.
        if id(storage) not in self._known:
            self._known.add(id(storage))
            self._alive += storage.nbytes()
            weakref.finalize(storage, self._remove, id(storage), storage.nbytes())

    def _remove(self, known, size):
        self._known.remove(known)
        self._alive -= size
