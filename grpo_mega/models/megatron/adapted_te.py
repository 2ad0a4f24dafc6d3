"""Transformer Engine's linear layers with adapters. Import it only where Transformer Engine is installed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.extensions import transformer_engine as te
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

from grpo_mega.config.schema import LoRAConfig
from grpo_mega.models.adapters import Adapter, Split
from grpo_mega.models.megatron.adapted import Adapted

_COLUMN = (te.TEColumnParallelLinear, te.TELayerNormColumnParallelLinear)
_PLAIN = (te.TELinear, *_COLUMN, te.TERowParallelLinear)
_GROUPED = (te.TEColumnParallelGroupedLinear, te.TERowParallelGroupedLinear)


class _AdaptedTE(Adapted):
    """Mixin of a layer of Transformer Engine, which keeps group and input under other names than Megatron's."""

    config: TransformerConfig
    _tp_group: Any

    def _split(self: Any) -> Split:
        axis = 0 if isinstance(self, _COLUMN) else 1 if isinstance(self, te.TERowParallelLinear) else None
        return Split(self._tp_group, axis, self.config.sequence_parallel, expert=False)

    def _adapted_input(self: Any, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(self, te.TELayerNormColumnParallelLinear):
            return x
        # The layer contains the norm and does not return its output, so the adapter's input is computed again, as
        # `RMSNorm` does.
        if self.config.layernorm_zero_centered_gamma:
            return F.rms_norm(x.float(), x.shape[-1:], 1 + self.layer_norm_weight.float(), self.eps).to(x.dtype)
        return F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps)


class _AdaptedGrouped:
    """Mixin of a layer that holds the routed experts of a rank, each with its own adapters."""

    num_gemms: int
    _tp_group: Any
    _pg_collection: Any

    def add_adapters(self: Any, lora: LoRAConfig, widths: list[int]) -> None:
        """Adds adapters to every expert, with values that are not yet initialised."""
        split = Split(self._tp_group, 0 if isinstance(self, te.TEColumnParallelGroupedLinear) else 1, False, True)
        self.adapter = torch.nn.ModuleList(Adapter(lora, widths, w, split) for w in self.adapted_weights())

    def adapted_weights(self: Any) -> list[torch.Tensor]:
        """The matrices [outputs, inputs] that have adapters, one for each expert."""
        return [getattr(self, f"weight{i}") for i in range(self.num_gemms)]

    def forward(self: Any, x: torch.Tensor, m_splits: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output of the layer with what the adapters add, and its bias; `m_splits` are the rows of each expert."""
        output, bias = super().forward(x, m_splits)  # type: ignore[misc]
        sizes = m_splits.tolist() if isinstance(m_splits, torch.Tensor) else [*m_splits]
        added = [adapter(rows) for adapter, rows in zip(self.adapter, x.split(sizes), strict=True)]
        return output + torch.cat(added), bias

    def sharded_state_dict(
        self: Any, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The sharded state of the layer, with the adapters' under `prefix`adapter."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        first, everyone = self._pg_collection.ep.rank() * self.num_gemms, self._pg_collection.ep.size()
        adapters: list[Adapter] = [*self.adapter]
        for number, adapter in enumerate(adapters):
            expert = (len(sharded_offsets), first + number, everyone * self.num_gemms)
            name, gated = f"{prefix}adapter.{number}.", prefix.endswith("linear_fc1.")
            tensors = adapter.sharded_state_dict(name, (*sharded_offsets, expert), metadata, gated)
            # Replicas of an expert are other ranks than those of dense layers, of which the metadata tells.
            for tensor in tensors.values():
                tensor.replica_id = (*tensor.replica_id[:2], self._pg_collection.expt_dp.rank())
            # The keys that Megatron uses for experts that are computed one after the other, so checkpoints fit either
            # kind.
            replace_prefix_for_sharding(tensors, name, f"{prefix}adapter.")
            state |= tensors
        return state


ADAPTED_TE: dict[type, type] = {
    **{kind: type(f"Adapted{kind.__name__}", (_AdaptedTE, kind), {}) for kind in _PLAIN},
    **{kind: type(f"Adapted{kind.__name__}", (_AdaptedGrouped, kind), {}) for kind in _GROUPED},
}
"""{class of a linear layer of Transformer Engine: the same layer with adapters}"""
