"""Megatron's linear layers with adapters (LoRA: Hu et al., 2021), its own and Transformer Engine's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

from grpo_mega.config.schema import LoRAConfig
from grpo_mega.models.adapters import Adapter, Split, target_of
from grpo_mega.models.megatron.layers import WholeColumnLinear, WholeRowLinear


def use_adapters(gpt: GPTModel, lora: LoRAConfig, transformer_engine: bool) -> None:
    """Adds adapters to the linear layers that `lora.targets` names."""
    kinds = ADAPTED | (_of_transformer_engine() if transformer_engine else {})
    for name, module in [*gpt.named_modules()]:
        if target_of(name) in lora.targets:
            module.__class__ = kinds[type(module)]
            module.add_adapters(lora, _widths(name, module, gpt.config))


def _widths(name: str, module: Any, config: TransformerConfig) -> list[int]:
    """The rows of each matrix that Megatron has fused in a layer, see `Adapter`."""
    if name.endswith(".linear_qkv"):
        groups, channels = config.num_query_groups or 1, config.kv_channels or 0
        return [config.num_attention_heads // groups * channels, channels, channels]
    rows = module.adapted_weights()[0].shape[0]
    return [rows // 2, rows // 2] if name.endswith(".linear_fc1") else [rows]


class _Adapted:
    """What a linear layer does that has adapters."""

    adapter: Adapter

    def add_adapters(self: Any, lora: LoRAConfig, widths: list[int]) -> None:
        """Adds adapters, with values that are not yet initialised."""
        self.adapter = Adapter(lora, widths, self.weight, self._split())

    def adapted_weights(self: Any) -> list[torch.Tensor]:
        """The matrices [outputs, inputs] that have adapters."""
        return [self.weight]

    def _split(self: Any) -> Split:
        axis = 0 if isinstance(self, ColumnParallelLinear) else 1
        return Split(self.tp_group, axis, self.config.sequence_parallel and not self.is_expert, self.is_expert)

    def forward(self: Any, x: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As without adapters, and what they add."""
        output, bias = super().forward(x, *arguments)  # type: ignore[misc]
        return output + self.adapter(self._adapted_input(x)), bias

    def _adapted_input(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def sharded_state_dict(
        self: Any, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """As without adapters, and with theirs under `prefix`adapter."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        gated = prefix.endswith("linear_fc1.")
        return state | self.adapter.sharded_state_dict(f"{prefix}adapter.", sharded_offsets, metadata, gated)


class AdaptedColumnLinear(_Adapted, ColumnParallelLinear):
    """Megatron's column parallel layer with adapters."""


class AdaptedRowLinear(_Adapted, RowParallelLinear):
    """Megatron's row parallel layer with adapters."""


class AdaptedWholeColumnLinear(_Adapted, WholeColumnLinear):
    """`WholeColumnLinear` with adapters."""


class AdaptedWholeRowLinear(_Adapted, WholeRowLinear):
    """`WholeRowLinear` with adapters."""


ADAPTED: dict[type, type] = {
    ColumnParallelLinear: AdaptedColumnLinear,
    RowParallelLinear: AdaptedRowLinear,
    WholeColumnLinear: AdaptedWholeColumnLinear,
    WholeRowLinear: AdaptedWholeRowLinear,
}
"""{class of a linear layer: the one with adapters}"""


def _of_transformer_engine() -> dict[type, type]:
    """The same of Transformer Engine's, which is there on GPUs only."""
    from megatron.core.extensions import transformer_engine as te

    class _AdaptedTE(_Adapted):
        """A layer of Transformer Engine's; its group and input are kept under other names."""

        config: TransformerConfig
        _tp_group: Any

        def _split(self: Any) -> Split:
            axis = 0 if isinstance(self, column) else 1 if isinstance(self, te.TERowParallelLinear) else None
            return Split(self._tp_group, axis, self.config.sequence_parallel, expert=False)

        def _adapted_input(self: Any, x: torch.Tensor) -> torch.Tensor:
            if not isinstance(self, te.TELayerNormColumnParallelLinear):
                return x
            # The layer has the norm inside. Gemma's multiplies by 1 + weight, in float32.
            if self.config.layernorm_zero_centered_gamma:
                return F.rms_norm(x.float(), x.shape[-1:], 1 + self.layer_norm_weight.float(), self.eps).to(x.dtype)
            return F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps)

    class _AdaptedGrouped:
        """The routed experts of a rank in one layer, each with adapters of its own."""

        num_gemms: int
        _tp_group: Any
        _pg_collection: Any

        def add_adapters(self: Any, lora: LoRAConfig, widths: list[int]) -> None:
            split = Split(self._tp_group, 0 if isinstance(self, te.TEColumnParallelGroupedLinear) else 1, False, True)
            self.adapter = torch.nn.ModuleList(Adapter(lora, widths, w, split) for w in self.adapted_weights())

        def adapted_weights(self: Any) -> list[torch.Tensor]:
            return [getattr(self, f"weight{i}") for i in range(self.num_gemms)]

        def forward(self: Any, x: torch.Tensor, m_splits: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
            output, bias = super().forward(x, m_splits)  # type: ignore[misc]
            sizes = m_splits.tolist() if isinstance(m_splits, torch.Tensor) else [*m_splits]
            added = [adapter(rows) for adapter, rows in zip(self.adapter, x.split(sizes), strict=True)]
            return output + torch.cat(added), bias

        def sharded_state_dict(
            self: Any, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
        ) -> dict[str, Any]:
            metadata = ensure_metadata_has_dp_cp_group(metadata)
            state = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
            for number, tensors in enumerate(self._sharded_adapters(prefix, sharded_offsets, metadata)):
                for tensor in tensors.values():
                    tensor.replica_id = (*tensor.replica_id[:2], self._pg_collection.expt_dp.rank())
                # The keys of Megatron's experts that are computed one after the other, so that either can be read.
                replace_prefix_for_sharding(tensors, f"{prefix}adapter.{number}.", f"{prefix}adapter.")
                state |= tensors
            return state

        def _sharded_adapters(self: Any, prefix: str, offsets: tuple, metadata: dict) -> Iterator[dict[str, Any]]:
            first, everyone = self._pg_collection.ep.rank() * self.num_gemms, self._pg_collection.ep.size()
            adapters: list[Adapter] = [*self.adapter]
            for number, adapter in enumerate(adapters):
                expert = (len(offsets), first + number, everyone * self.num_gemms)
                gated = prefix.endswith("linear_fc1.")
                yield adapter.sharded_state_dict(f"{prefix}adapter.{number}.", (*offsets, expert), metadata, gated)

    column = (te.TEColumnParallelLinear, te.TELayerNormColumnParallelLinear)
    plain = (te.TELinear, *column, te.TERowParallelLinear)
    grouped = (te.TEColumnParallelGroupedLinear, te.TERowParallelGroupedLinear)
    kinds = {kind: type(f"Adapted{kind.__name__}", (_AdaptedTE, kind), {}) for kind in plain}
    return kinds | {kind: type(f"Adapted{kind.__name__}", (_AdaptedGrouped, kind), {}) for kind in grouped}
