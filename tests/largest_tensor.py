"""Measures the largest tensor that a piece of code makes."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation returns inside."""

    elements = 0

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        result = operation(*arguments, **(options or {}))
        tensors = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.elements = max([self.elements, *(x.numel() for x in tensors)])
        return result
