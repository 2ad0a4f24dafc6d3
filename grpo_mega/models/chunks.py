"""The pieces of the pipeline that one rank holds: one, or several when stages are interleaved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group


class ModelChunks(MegatronModule):
    """This rank's pieces in the order the data meets them; they save and load as one module."""

    def __init__(self, chunks: list[GPTModel]) -> None:
        super().__init__(config=chunks[0].config)
        self.chunks = torch.nn.ModuleList(chunks)

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
        return {str(i): c.sharded_state_dict(prefix, sharded_offsets, metadata) for i, c in enumerate(self)}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> None:
        """Loads what `sharded_state_dict` names."""
        for i, chunk in enumerate(self):
            chunk.load_state_dict(state_dict[str(i)], strict=strict, assign=assign)
