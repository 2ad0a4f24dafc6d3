"""Megatron's own linear layers with adapters (LoRA: Hu et al., 2021); those of Transformer Engine: `adapted_te`."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

from grpo_mega.config.schema import LoRAConfig
from grpo_mega.models.adapters import Adapter, Split, target_of
from grpo_mega.models.megatron.layers import WholeColumnLinear, WholeRowLinear


def use_adapters(gpt: GPTModel, lora: LoRAConfig, transformer_engine: bool) -> None:
    """Adds adapters to the linear layers that `lora.targets` names."""
    kinds = ADAPTED
    if transformer_engine:
        from grpo_mega.models.megatron.adapted_te import ADAPTED_TE

        kinds = ADAPTED | ADAPTED_TE
    # A list, because new adapters change the dictionaries that `named_modules` walks through.
    for name, module in [*gpt.named_modules()]:
        if target_of(name) in lora.targets:
            # The weight keeps its shards, marks and checkpoint key, which a new module would lose.
            module.__class__ = kinds[type(module)]
            # Numbers of rows of the matrices that Megatron has fused in the layer, see `Adapter`.
            rows = module.adapted_weights()[0].shape[0]
            widths = [rows // 2, rows // 2] if name.endswith(".linear_fc1") else [rows]
            if name.endswith(".linear_qkv"):
                groups, channels = gpt.config.num_query_groups or 1, gpt.config.kv_channels or 0
                widths = [gpt.config.num_attention_heads // groups * channels, channels, channels]
            module.add_adapters(lora, widths)


class Adapted:
    """Mixin of a linear layer that has adapters."""

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
        """The output of the layer with what the adapters add, and its bias."""
        output, bias = super().forward(x, *arguments)  # type: ignore[misc]
        return output + self.adapter(self._adapted_input(x)), bias

    def _adapted_input(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def sharded_state_dict(
        self: Any, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The sharded state of the layer, with the adapters' under `prefix`adapter."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        gated = prefix.endswith("linear_fc1.")
        return state | self.adapter.sharded_state_dict(f"{prefix}adapter.", sharded_offsets, metadata, gated)


class AdaptedColumnLinear(Adapted, ColumnParallelLinear):
    """Megatron's column parallel layer with adapters."""


class AdaptedRowLinear(Adapted, RowParallelLinear):
    """Megatron's row parallel layer with adapters."""


class AdaptedWholeColumnLinear(Adapted, WholeColumnLinear):
    """`WholeColumnLinear` with adapters."""


class AdaptedWholeRowLinear(Adapted, WholeRowLinear):
    """`WholeRowLinear` with adapters."""


ADAPTED: dict[type, type] = {
    ColumnParallelLinear: AdaptedColumnLinear,
    RowParallelLinear: AdaptedRowLinear,
    WholeColumnLinear: AdaptedWholeColumnLinear,
    WholeRowLinear: AdaptedWholeRowLinear,
}
"""{class of a linear layer: the same layer with adapters}"""
