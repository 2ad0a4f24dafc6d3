"""Pieces of the model on one pipeline rank: one, or several when stages are interleaved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

from grpo_mega.models.adapters import is_adapter

SCALAR_HEAD = "scalar_head."
HEADS = ("output_layer.", SCALAR_HEAD)
"""Prefixes of the keys of a head's parameters."""


class ModelChunks(MegatronModule):
    """This rank's pieces, in pipeline order; they save and load as one module."""

    def __init__(self, chunks: list[GPTModel]) -> None:
        super().__init__(config=chunks[0].config)
        self.chunks = torch.nn.ModuleList(chunks)
        self._left_out: Callable[[str], bool] = lambda _: False

    def __iter__(self) -> Iterator[GPTModel]:
        return iter(self.chunks)

    @property
    def last(self) -> GPTModel:
        """The piece with the output layer, on the last pipeline stage."""
        return self.chunks[-1]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Sharded state {"0": tensors of the first piece, ...}, with keys that number the layers of the whole model."""
        # A stage with a copy of the embedding needs this group in the metadata.
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        state = {str(i): c.sharded_state_dict(prefix, sharded_offsets, metadata) for i, c in enumerate(self)}
        return {i: {k: x for k, x in tensors.items() if not self._left_out(k)} for i, tensors in state.items()}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> None:
        """Loads a state in the format of `sharded_state_dict`."""
        for i, chunk in enumerate(self):
            # Strict loading expects every key, so what is left out is loaded from the module itself.
            kept = {key: tensor for key, tensor in chunk.state_dict().items() if self._left_out(key)}
            chunk.load_state_dict(state_dict[str(i)] | kept, strict=strict, assign=assign)

    @contextmanager
    def leaving_out(self, unwanted: Callable[[str], bool]) -> Iterator[None]:
        """Context in which parameters with `unwanted` keys are neither saved nor loaded; nested contexts add up."""
        before = self._left_out
        self._left_out = lambda key: before(key) or unwanted(key)
        try:
            yield
        finally:
            self._left_out = before

    def body_alone(self) -> AbstractContextManager[None]:
        """Context in which the head is neither saved nor loaded, so that the body can come from another model."""
        return self.leaving_out(lambda key: key.startswith(HEADS))

    def without_adapters(self) -> AbstractContextManager[None]:
        """Context in which adapters are neither saved nor loaded, so that the rest can come from another model."""
        return self.leaving_out(is_adapter)

    def adapters_alone(self) -> AbstractContextManager[None]:
        """Context in which only adapters are saved and loaded."""
        return self.leaving_out(lambda key: not is_adapter(key))
