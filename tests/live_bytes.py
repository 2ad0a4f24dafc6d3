"""How much memory a piece of code holds at its worst."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations return inside, as long as anybody holds them.

    Attributes:
        most: Bytes that were alive at once, at most.
    """

    def __init__(self):
        super().__init__()
        self.most = self._alive = 0
        self._known = set()

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        result = operation(*arguments, **(options or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._meet(tensor.untyped_storage())
        self.most = max(self.most, self._alive)
        return result

    def _meet(self, storage):
        # A storage has one Python object as long as it lives, whichever tensors show it.
        if id(storage) not in self._known:
            self._known.add(id(storage))
            self._alive += storage.nbytes()
            weakref.finalize(storage, self._lose, id(storage), storage.nbytes())

    def _lose(self, known, size):
        self._known.remove(known)
        self._alive -= size
