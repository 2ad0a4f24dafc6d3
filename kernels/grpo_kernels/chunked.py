"""The output layer's matrix products, a chunk of rows at a time, and the sums over tensor parallel ranks they need.

A chunk is made of whole blocks of rows, and every product of one block, whatever the chunk: which products there are,
and in which order they add up, depends on the number of rows alone. So no bit of a result depends on the chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels import checks
from grpo_kernels.dispatch import backend as choose_backend
from grpo_kernels.vocab_parallel import Shard, shard_of

HIDDEN_GRADS = ("all_reduce", "reduce_scatter", "partial")

BLOCK_CPU, BLOCK_GPU = 64, 2048
"""Rows of a block. On a GPU adding a block's product to the weight's gradient reads and writes 8 V H bytes, which takes
less time than its 4096 V H operations; on a CPU the fewest that cost nothing."""


class Settings(TypedDict, total=False):
    """Keyword arguments of all linear functions; `output_layer` has the defaults, `linear.py` says what they mean."""

    temperature: float
    chunk: int | None
    logits_dtype: torch.dtype
    vocab_size: int | None
    group: dist.ProcessGroup | None
    hidden_grad: str
    backend: str | None


@dataclass(frozen=True)
class OutputLayer:
    """What a call does with its output layer.

    Attributes:
        shard: This rank's part of the vocabulary.
        inv_temperature: 1 / temperature.
        chunk: Rows per chunk, whole blocks.
        logits_dtype: Of the logits inside a chunk.
        hidden_grad: How the ranks' parts of the gradient of `hidden` become one; see `linear.py`.
        backend: The implementation that was asked for, or None.
    """

    shard: Shard
    inv_temperature: float
    chunk: int
    logits_dtype: torch.dtype
    hidden_grad: str
    backend: str | None

    def chunks(self, count: int) -> Iterator[slice]:
        """Slices of `count` rows, each but the last of whole blocks; one empty slice when there is none."""
        return (slice(start, min(start + self.chunk, count)) for start in range(0, max(count, 1), self.chunk))

    def operands(self, hidden: Tensor, output_weight: Tensor) -> Operands:
        """What the products are made of: [n, H] rows of all ranks and [columns, H] weight without padding."""
        hidden = hidden.detach().to(output_weight.dtype)
        hidden = _gathered(hidden, self.shard) if self.gathers else hidden
        return Operands.of(hidden, output_weight.detach()[: self.shard.columns])

    def operations(self, operands: Operands, one_launch: bool = False) -> Any:
        """The row operations for chunks of these operands; `one_launch`: see `dispatch.backend`."""
        hidden = operands.hidden
        logits = hidden.new_empty(0, self.shard.columns, dtype=self.logits_dtype)
        return choose_backend(logits, self.backend, one_launch, gradient=hidden.dtype).operations

    def reduced(self, grad_hidden: Tensor | None) -> Tensor | None:
        """The gradient of `hidden` as `hidden_grad` wants it, from this rank's part of it [n, H]."""
        if grad_hidden is None or self.shard.ranks == 1 or self.hidden_grad == "partial" or not len(grad_hidden):
            return grad_hidden
        if self.gathers:
            mine = grad_hidden.new_empty(len(grad_hidden) // self.shard.ranks, grad_hidden.shape[1])
            dist.reduce_scatter_tensor(mine, grad_hidden, group=self.shard.group)
            return mine
        dist.all_reduce(grad_hidden, group=self.shard.group)
        return grad_hidden

    @property
    def gathers(self) -> bool:
        """Whether `hidden` is this rank's part of the rows."""
        return self.hidden_grad == "reduce_scatter" and self.shard.ranks > 1


def output_layer(
    hidden: Tensor,
    output_weight: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    logits_dtype: torch.dtype = torch.float32,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    hidden_grad: str = "all_reduce",
    backend: str | None = None,
) -> OutputLayer:
    """Checks the arguments and decides what is left open.

    Raises:
        ValueError, TypeError: An argument is bad; names it.
    """
    checks.require_linear(hidden, output_weight)
    checks.require_group(group)
    checks.require_temperature(temperature)
    checks.require_one_of("hidden_grad", hidden_grad, HIDDEN_GRADS)
    checks.require_one_of("logits_dtype", logits_dtype, (torch.float32, torch.bfloat16))
    checks.require_chunk(chunk)
    choose_backend(output_weight, backend)  # refuses a name that nobody has
    shard = shard_of(len(output_weight), vocab_size, group)
    if chunk is None:  # from a width that all ranks have in common: they exchange something for every chunk
        chunk = _default_chunk(-(-shard.vocab_size // shard.ranks), output_weight)
    block = _block(output_weight)
    chunk = -(-chunk // block) * block
    layer = OutputLayer(shard, 1.0 / temperature, chunk, logits_dtype, hidden_grad, backend)
    checks.require_ids(ids, len(hidden) * (shard.ranks if layer.gathers else 1), hidden.device, shard.vocab_size)
    return layer


@dataclass
class Operands:
    """What is multiplied: [n, H] hidden states and [columns, H] output weight, of one dtype."""

    hidden: Tensor
    output_weight: Tensor

    @classmethod
    def of(cls, hidden: Tensor, output_weight: Tensor) -> Operands:
        """Hidden states rounded to the weight's dtype; float32 on a CPU, whose product of bfloat16 rounds its sums."""
        hidden = hidden.to(output_weight.dtype)
        return cls(hidden, output_weight) if output_weight.is_cuda else cls(hidden.float(), output_weight.float())

    def logits(self, part: slice, dtype: torch.dtype) -> Tensor:
        """[r, columns] logits of some rows, counted from the beginning of a block."""
        rows = self.hidden[part]
        out = torch.empty(len(rows), len(self.output_weight), dtype=dtype, device=rows.device)
        for block in self.blocks(len(rows)):
            _multiply(rows[block], self.output_weight.t(), out[block])
        return out

    def gradient_for(self, logits: Tensor) -> Tensor:
        """[r, columns] of the operands' dtype for the gradient of a chunk's logits: these where that is theirs."""
        same = logits.dtype == self.hidden.dtype
        return logits if same else torch.empty_like(logits, dtype=self.hidden.dtype)

    def blocks(self, count: int) -> Iterator[slice]:
        """Slices of `count` rows."""
        size = _block(self.output_weight)
        return (slice(start, start + size) for start in range(0, count, size))


@dataclass
class Gradients:
    """Where gradients add up; None for those that nobody wants.

    Attributes:
        hidden: [n, H], every row written once.
        output_weight: [V, H] float32, of which the padding stays as it is.
    """

    hidden: Tensor | None
    output_weight: Tensor | None

    @classmethod
    def wanted(
        cls, operands: Operands, hidden: Tensor, output_weight: Tensor, main_grad: Tensor | None = None
    ) -> Gradients:
        """For the tensors that require one; the weight's goes to `main_grad` when that is given."""
        rows, total = None, None
        if hidden.requires_grad:
            rows = torch.empty_like(operands.hidden, dtype=hidden.dtype)
        if output_weight.requires_grad:
            total = torch.zeros_like(output_weight, dtype=torch.float32) if main_grad is None else main_grad
        return cls(rows, total)

    def add(self, operands: Operands, part: slice, grad_logits: Tensor, counted: Tensor) -> None:
        """Adds what the gradient [r, columns] of some rows' logits gives, in the operands' dtype.

        Rows that are not `counted` [r], whose gradient is 0, may hold anything, NaN included.
        """
        hidden = operands.hidden[part]
        for block in operands.blocks(len(hidden)):
            if self.hidden is not None:
                _multiply(grad_logits[block], operands.output_weight, self.hidden[part][block])
            if self.output_weight is not None:
                rows = torch.where(counted[block, None], hidden[block], 0)
                _add_product(self.output_weight[: len(operands.output_weight)], grad_logits[block].t(), rows)


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b, summed in float32 and then rounded to the dtype of `out`."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif out.dtype == torch.float32:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        out.copy_(torch.mm(a, b))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in float32."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


def _gathered(hidden: Tensor, shard: Shard) -> Tensor:
    """[n / ranks, H] of each rank -> [n, H]."""
    whole = hidden.new_empty(len(hidden) * shard.ranks, hidden.shape[1])
    dist.all_gather_into_tensor(whole, hidden.contiguous(), group=shard.group)
    return whole


def _block(output_weight: Tensor) -> int:
    return BLOCK_GPU if output_weight.is_cuda else BLOCK_CPU


def _default_chunk(columns: int, output_weight: Tensor) -> int:
    """One block on a GPU, 1.9 GB of logits and gradient at 151936 columns in bfloat16; on a CPU 2 MiB of logits, or one
    block.
    """
    return BLOCK_GPU if output_weight.is_cuda else max(1, 2**19 // columns)
