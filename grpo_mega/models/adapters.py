"""Low-rank adapters (LoRA: Hu et al., 2021, arXiv 2106.09685): y = W x + alpha / rank * B (A x), with W frozen.

Megatron fuses matrices that Hugging Face keeps separate: queries, keys and values; the gate and its factor. Each has
its own A and B, the adapter that `peft` would train. A stacks them; a row of B belongs to the row of W that it is added
to, so B is sharded, and named in checkpoints, like W.

Ranks exchange only A x, which is `rank` wide: Megatron exchanges x and W x for W itself.
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
"""Suffixes of the names of adapters, see `named_box`, after the name of the layer."""


@dataclass(frozen=True)
class Split:
    """Sharding of a linear layer over ranks.

    Attributes:
        group: The ranks that share the matrix.
        axis: 0 when each rank has some rows (column parallel), 1 for columns (row parallel), None for the whole matrix.
        sequence: Whether each rank has some of the tokens outside of the layer (sequence parallelism).
        expert: Whether it is a routed expert's: the dispatcher gathers tokens before the layer, and sums them after it.
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
        """Creates uninitialised adapters of a layer with this `weight` [outputs, inputs].

        In every block of sum(widths) rows, the first widths[0] belong to the first matrix, and so on.
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
        """Tells Megatron which gradients to sum over tensor parallel ranks, and on which ranks their norm counts."""
        split = self.split
        for parameter, cut in ((self.a, 1), (self.b, 0)):
            mark: Any = parameter
            if split.axis == cut or (split.expert and split.group.rank() == 0):
                # A shard, or the first of the replicas of an expert's matrix: it counts on this rank.
                set_tensor_model_parallel_attributes(parameter, True, cut, 1)
            elif split.expert:
                # Replicated over a group that Megatron does not know for experts: it counts only on the first rank of
                # that group.
                mark.shared = True
            else:
                # Megatron counts it on the first rank; the gradient covers only this rank's tokens if the input does.
                mark.sequence_parallel = split.sequence

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Output of the adapters, to be added to the layer's: [..., inputs] -> [..., outputs]."""
        a, b, split = self.a, self.b, self.split
        if split.group.size() == 1 or split.axis is None:
            return self._outputs(F.linear(x, a), b)
        # The dispatcher gathers tokens before an expert and sums them after it; a replicated matrix has its gradients
        # summed.
        if split.expert:
            if split.axis == 0:
                return self._outputs(F.linear(x, copy_to_tensor_model_parallel_region(a, split.group)), b)
            return self._outputs(F.linear(x, a), copy_to_tensor_model_parallel_region(b, split.group))
        return self._outputs(_exchanged(F.linear(x, a), split), b)

    def _outputs(self, inner: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Applies B: [..., matrices * rank] -> [..., outputs]."""
        # Scaled where the tensor is only `rank` wide.
        inner = inner * self.scale
        if len(self.widths) == 1:
            return F.linear(inner, b)
        # Rows of the fused matrices alternate by block (query groups); each product takes the rows of its matrix in all
        # blocks.
        blocks = b.unflatten(0, (-1, sum(self.widths)))
        outputs = [
            F.linear(part, rows.flatten(0, 1)).unflatten(-1, (len(blocks), width))
            for part, rows, width in zip(
                inner.split(self.rank, -1), blocks.split(self.widths, 1), self.widths, strict=True
            )
        ]
        return torch.cat(outputs, -1).flatten(-2)

    def sharded_state_dict(self, prefix: str, sharded_offsets: tuple, metadata: dict, gated: bool) -> dict[str, Any]:
        """Sharded state in the format of the layer's weight; `gated` when it stacks the gate and its factor."""
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
    """A x for the tokens that B needs, summed over the columns."""
    if split.axis == 0:
        if split.sequence:
            return gather_from_sequence_parallel_region(inner, tensor_parallel_output_grad=True, group=split.group)
        return copy_to_tensor_model_parallel_region(inner, split.group)
    if split.sequence:
        return reduce_scatter_to_sequence_parallel_region(inner, split.group)
    return reduce_from_tensor_model_parallel_region(inner, split.group)


@torch.no_grad()
def initialize_adapters(module: MegatronModule, seed: int) -> None:
    """Fills every A with noise that depends only on the seed and its name, not the layout, and every B with 0.

    Uniform within 1 / sqrt(inputs) as in `peft`, to which recommended learning rates refer. Initially the model
    computes the same as without adapters.
    """
    for shard in shards(module):
        name, box = named_box(shard)
        if name.endswith(B):
            shard.data.zero_()
        elif name.endswith(A):
            shape = shard.global_shape[shard.prepend_axis_num :]
            bound = shape[-1] ** -0.5
            # The whole matrix is drawn on every rank and then cut, because the numbers must not depend on the layout.
            whole = torch.empty(shape).uniform_(-bound, bound, generator=generator_of(name, seed))
            shard.data.copy_(whole[tuple(slice(*ends) for ends in box)])


def target_of(layer: str) -> str | None:
    """Word of `LoRAConfig.targets` for a linear layer, by its name in the model or in checkpoints."""
    last = layer.rpartition(".")[2]
    if last in ("linear_fc1", "linear_fc2"):
        return "experts" if ".experts." in layer else "mlp"
    return "attention" if ".self_attention." in layer and last.startswith("linear_") else None


def is_adapter(key: str) -> bool:
    """Whether a checkpoint's key or a parameter's name is that of an adapter."""
    return ".adapter." in key
