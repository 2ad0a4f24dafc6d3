"""Low-rank adapters (LoRA: Hu et al., 2021, arXiv 2106.09685): y = W x + alpha / rank * B (A x), W as it was loaded.

Megatron fuses matrices that Hugging Face has apart: queries, keys and values; the gate and what it multiplies. Each of
them has an A and a B of its own, so that it is the adapter that `peft` would train. A holds them one under the other;
a row of B belongs to the row of W that it is added to, so B is split over ranks, and named in checkpoints, like W.

What travels between ranks is A x, which is `rank` wide: Megatron moves x and W x for W itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from grpo_mega.config.schema import LoRAConfig
from grpo_mega.models.shards import generator_of, named_box, shards

A, B = ".adapter.a", ".adapter.b"
"""What the names of adapters end with, see `named_box`; before it stands the name of the layer."""


@dataclass(frozen=True)
class Split:
    """How a linear layer is split over ranks.

    Attributes:
        group: The ranks that share the matrix.
        axis: 0 when each has some of its rows (column parallel), 1 for columns (row parallel), None for all of it.
        sequence: Each rank has some of the tokens outside of the layer (sequence parallelism).
        expert: A routed expert's: the dispatcher gathers tokens before the layer, and sums them after it.
    """

    group: dist.ProcessGroup
    axis: int | None
    sequence: bool
    expert: bool


class Adapter(torch.nn.Module):
    """The adapters of one linear layer, fused as the layer is.

    Attributes:
        a: [matrices * rank, inputs], this rank's columns when the layer is split by them.
        b: [outputs, rank], rows in the order of the layer's, this rank's when the layer is split by them.
    """

    def __init__(self, lora: LoRAConfig, widths: Sequence[int], weight: torch.Tensor, split: Split) -> None:
        """Adapters of a layer with this `weight` [outputs, inputs], their values not yet initialised.

        Of every sum(widths) rows the first widths[0] are the first matrix's, and so on.
        """
        super().__init__()
        self.split, self.scale, self.rank, self.widths = split, lora.alpha / lora.rank, lora.rank, [*widths]
        outputs, inputs = weight.shape
        assert outputs % sum(widths) == 0, f"{outputs} rows are not made of {self.widths}"
        like: dict[str, Any] = dict(dtype=weight.dtype, device=weight.device)
        self.a = torch.nn.Parameter(torch.empty(len(widths) * lora.rank, inputs, **like))
        self.b = torch.nn.Parameter(torch.empty(outputs, lora.rank, **like))
        self._mark()

    def _mark(self) -> None:
        """Tells Megatron which gradients to sum over tensor parallel ranks, and whose norm counts on which rank."""
        split = self.split
        for parameter, cut in ((self.a, 1), (self.b, 0)):
            mark: Any = parameter
            if split.axis == cut or (split.expert and split.group.rank() == 0):
                set_tensor_model_parallel_attributes(parameter, True, cut, 1)  # counts here
            elif split.expert:
                mark.shared = True  # counts on the first rank of the group, which Megatron does not know for experts
            else:
                # Megatron counts it on the first rank; the gradient is of this rank's tokens where it meets only these.
                mark.sequence_parallel = split.sequence

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs], what is to be added to the layer's output."""
        a, b, split = self.a, self.b, self.split
        if split.group.size() == 1 or split.axis is None:
            return self._outputs(F.linear(x, a), b)
        if split.expert:  # tokens are gathered and summed elsewhere; what all ranks have gets a part from each
            if split.axis == 0:
                return self._outputs(F.linear(x, copy_to_tensor_model_parallel_region(a, split.group)), b)
            return self._outputs(F.linear(x, a), copy_to_tensor_model_parallel_region(b, split.group))
        return self._outputs(_exchanged(F.linear(x, a), split), b)

    def _outputs(self, inner: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """[..., matrices * rank] -> [..., outputs]."""
        inner = inner * self.scale
        if len(self.widths) == 1:
            return F.linear(inner, b)
        blocks = b.unflatten(0, (-1, sum(self.widths)))
        outputs = [
            F.linear(part, rows.flatten(0, 1)).unflatten(-1, (len(blocks), width))
            for part, rows, width in zip(
                inner.split(self.rank, -1), blocks.split(self.widths, 1), self.widths, strict=True
            )
        ]
        return torch.cat(outputs, -1).flatten(-2)

    def sharded_state_dict(self, prefix: str, sharded_offsets: tuple, metadata: dict, gated: bool) -> dict[str, Any]:
        """As Megatron saves the layer's weight: `gated` when it has the gate above what it multiplies."""
        axes = {"a": 1} if self.split.axis == 1 else {"b": 0} if self.split.axis == 0 else {}
        state = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            axes,
            sharded_offsets,
            tp_group=self.split.group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if gated:
            state[f"{prefix}b"] = apply_swiglu_sharded_factory(state[f"{prefix}b"], sharded_offsets)
        return state


def _exchanged(inner: torch.Tensor, split: Split) -> torch.Tensor:
    """A x of the tokens, and summed over the columns, that B needs."""
    if split.axis == 0:
        if split.sequence:
            return gather_from_sequence_parallel_region(inner, tensor_parallel_output_grad=True, group=split.group)
        return copy_to_tensor_model_parallel_region(inner, split.group)
    if split.sequence:
        return reduce_scatter_to_sequence_parallel_region(inner, split.group)
    return reduce_from_tensor_model_parallel_region(inner, split.group)


@torch.no_grad()
def initialize_adapters(module: MegatronModule, seed: int) -> None:
    """Fills every A with noise that depends on the seed and its name alone, so not on the layout, and every B with 0.

    Uniform within 1 / sqrt(inputs) as in `peft`, for which recommended learning rates are meant. To begin with the
    model computes what it did without adapters.
    """
    for shard in shards(module):
        name, box = named_box(shard)
        if name.endswith(B):
            shard.data.zero_()
        elif name.endswith(A):
            shape = shard.global_shape[shard.prepend_axis_num :]
            bound = shape[-1] ** -0.5
            whole = torch.empty(shape).uniform_(-bound, bound, generator=generator_of(name, seed))
            shard.data.copy_(whole[tuple(slice(*ends) for ends in box)])


def target_of(layer: str) -> str | None:
    """The word of `LoRAConfig.targets` that means a linear layer, by its name in the model or in checkpoints."""
    last = layer.rpartition(".")[2]
    if last in ("linear_fc1", "linear_fc2"):
        return "experts" if ".experts." in layer else "mlp"
    return "attention" if ".self_attention." in layer and last.startswith("linear_") else None


def is_adapter(key: str) -> bool:
    """Whether a checkpoint's key, or a parameter's name, is that of an adapter."""
    return ".adapter." in key
