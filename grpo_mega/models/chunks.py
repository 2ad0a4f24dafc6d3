"""The pieces of the pipeline that one rank holds: one, or several when stages are interleaved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

HEADS = ("output_layer.", "scalar_head.")
"""What keys of a head's parameters begin with."""


class ModelChunks(MegatronModule):
    """This rank's pieces in the order the data meets them; they save and load as one module."""

    def __init__(self, chunks: list[GPTModel]) -> None:
        super().__init__(config=chunks[0].config)
        self.chunks = torch.nn.ModuleList(chunks)
        self._left_out: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[GPTModel]:
        return iter(self.chunks)

    @property
    def last(self) -> GPTModel:
        """The piece that holds the output layer, on the last pipeline stage."""
        return self.chunks[-1]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """{"0": the first piece's tensors, ...}; the keys inside name layers of the whole model."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)  # a stage with a copy of the embedding counts on it
        state = {str(i): c.sharded_state_dict(prefix, sharded_offsets, metadata) for i, c in enumerate(self)}
        return {i: {k: x for k, x in tensors.items() if not self._stays(k)} for i, tensors in state.items()}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> None:
        """Loads what `sharded_state_dict` names."""
        for i, chunk in enumerate(self):
            kept = {key: tensor for key, tensor in chunk.state_dict().items() if self._stays(key)}
            chunk.load_state_dict(state_dict[str(i)] | kept, strict=strict, assign=assign)

    @contextmanager
    def body_alone(self) -> Iterator[None]:
        """Inside, the head is neither saved nor loaded: it keeps its weights, and the body can be another model's."""
        self._left_out = HEADS
        try:
            yield
        finally:
            self._left_out = ()

    def _stays(self, key: str) -> bool:
        return key.startswith(self._left_out) if self._left_out else False
