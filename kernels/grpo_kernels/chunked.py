"""Matrix products of the output layer in chunks of rows, and their reductions over tensor parallel ranks.

A chunk consists of whole blocks of rows, and every product is over one block: the products and the order of their sum
depend only on the number of rows, so results are bit for bit independent of the chunk size.
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
"""Number of rows of a block. On a GPU adding a block's product to the weight's gradient reads and writes 8 V H bytes,
which takes less time than its 4096 V H operations; on a CPU the smallest block without loss of speed."""


class Settings(TypedDict, total=False):
    """Keyword arguments of all linear functions; `output_layer` has the defaults, `linear.py` documents them."""

    temperature: float
    chunk: int | None
    logits_dtype: torch.dtype
    vocab_size: int | None
    group: dist.ProcessGroup | None
    hidden_grad: str
    backend: str | None


@dataclass(frozen=True)
class OutputLayer:
    """Options of a call that concern the output layer.

    Attributes:
        shard: This rank's vocabulary shard.
        inv_temperature: 1 / temperature.
        chunk: Rows per chunk, whole blocks.
        logits_dtype: Dtype of the logits of a chunk.
        hidden_grad: How the ranks' partial gradients of `hidden` are combined; see `linear.py`.
        backend: The requested implementation, or None.
    """

    shard: Shard
    inv_temperature: float
    chunk: int
    logits_dtype: torch.dtype
    hidden_grad: str
    backend: str | None

    def chunks(self, count: int) -> Iterator[slice]:
        """Slices of `count` rows, all but the last of whole blocks; one empty slice for no rows."""
        return (slice(start, min(start + self.chunk, count)) for start in range(0, max(count, 1), self.chunk))

    def operands(self, hidden: Tensor, output_weight: Tensor) -> Operands:
        """Operands of the products: [n, H] rows of all ranks and the [columns, H] weight without padding."""
        hidden = hidden.detach().to(output_weight.dtype)
        hidden = _gathered(hidden, self.shard) if self.gathers else hidden
        return Operands.of(hidden, output_weight.detach()[: self.shard.columns])

    def operations(self, operands: Operands, one_launch: bool = False) -> Any:
        """Row operations for chunks of these operands; for `one_launch` see `dispatch.backend`."""
        hidden = operands.hidden
        logits = hidden.new_empty(0, self.shard.columns, dtype=self.logits_dtype)
        return choose_backend(logits, self.backend, one_launch, gradient=hidden.dtype).operations

    def reduced(self, grad_hidden: Tensor | None) -> Tensor | None:
        """Gradient of `hidden`, combined as `hidden_grad` requires, from this rank's partial gradient [n, H]."""
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
        """Whether `hidden` has only this rank's share of the rows."""
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
    """The `OutputLayer` of a call: checks the arguments and fills in defaults.

    Raises:
        ValueError, TypeError: An argument is bad; names it.
    """
    checks.require_linear(hidden, output_weight)
    checks.require_group(group)
    checks.require_temperature(temperature)
    checks.require_one_of("hidden_grad", hidden_grad, HIDDEN_GRADS)
    checks.require_one_of("logits_dtype", logits_dtype, (torch.float32, torch.bfloat16))
    checks.require_chunk(chunk)
    # Called only to refuse an unknown name.
    choose_backend(output_weight, backend)
    shard = shard_of(len(output_weight), vocab_size, group)
    if chunk is None:
        # Ranks exchange data for every chunk, so the size must follow from a width that is equal on all of them: a
        # rank's own columns without padding may be fewer.
        chunk = _default_chunk(-(-shard.vocab_size // shard.ranks), output_weight)
    block = _block(output_weight)
    # Whole blocks, or results would depend on the chunk size.
    chunk = -(-chunk // block) * block
    layer = OutputLayer(shard, 1.0 / temperature, chunk, logits_dtype, hidden_grad, backend)
    checks.require_ids(ids, len(hidden) * (shard.ranks if layer.gathers else 1), hidden.device, shard.vocab_size)
    return layer


@dataclass
class Operands:
    """Operands of the products: [n, H] hidden states and the [columns, H] output weight, of one dtype."""

    hidden: Tensor
    output_weight: Tensor

    @classmethod
    def of(cls, hidden: Tensor, output_weight: Tensor) -> Operands:
        """Operands in the weight's dtype; in float32 on a CPU, whose bfloat16 products round their sums."""
        hidden = hidden.to(output_weight.dtype)
        return cls(hidden, output_weight) if output_weight.is_cuda else cls(hidden.float(), output_weight.float())

    def logits(self, part: slice, dtype: torch.dtype) -> Tensor:
        """[r, columns] logits of some rows; `part` starts at the beginning of a block."""
        rows = self.hidden[part]
        out = torch.empty(len(rows), len(self.output_weight), dtype=dtype, device=rows.device)
        for block in self.blocks(len(rows)):
            _multiply(rows[block], self.output_weight.t(), out[block])
        return out

    def gradient_for(self, logits: Tensor) -> Tensor:
        """[r, columns] memory in the operands' dtype for the gradient of a chunk's logits: if possible the logits'."""
        same = logits.dtype == self.hidden.dtype
        return logits if same else torch.empty_like(logits, dtype=self.hidden.dtype)

    def blocks(self, count: int) -> Iterator[slice]:
        """Slices of `count` rows, one for each block."""
        size = _block(self.output_weight)
        return (slice(start, start + size) for start in range(0, count, size))


@dataclass
class Gradients:
    """Accumulated gradients; None if not needed.

    Attributes:
        hidden: [n, H], every row written once.
        output_weight: [V, H] float32, whose padding is not changed.
    """

    hidden: Tensor | None
    output_weight: Tensor | None

    @classmethod
    def wanted(
        cls, operands: Operands, hidden: Tensor, output_weight: Tensor, main_grad: Tensor | None = None
    ) -> Gradients:
        """Gradients for the tensors that require one; the weight's is added to `main_grad` if that is given."""
        rows, total = None, None
        if hidden.requires_grad:
            rows = torch.empty_like(operands.hidden, dtype=hidden.dtype)
        if output_weight.requires_grad:
            total = torch.zeros_like(output_weight, dtype=torch.float32) if main_grad is None else main_grad
        return cls(rows, total)

    def add(self, operands: Operands, part: slice, grad_logits: Tensor, active: Tensor) -> None:
        """Adds the contribution of some rows, from the gradient [r, columns] of their logits in the operands' dtype.

        Rows that are not `active` [r], whose gradient is 0, may have any values, NaN included.
        """
        hidden = operands.hidden[part]
        for block in operands.blocks(len(hidden)):
            if self.hidden is not None:
                _multiply(grad_logits[block], operands.output_weight, self.hidden[part][block])
            if self.output_weight is not None:
                # The gradient of such a row is 0, but the product would make NaN of 0 times a NaN in its hidden state.
                rows = torch.where(active[block, None], hidden[block], 0)
                _add_product(self.output_weight[: len(operands.output_weight)], grad_logits[block].t(), rows)


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Computes out = a @ b, summed in float32 and then rounded to the dtype of `out`."""
    # On a GPU torch sums bf16 products in float32 and rounds the sum; `out_dtype` keeps it unrounded. torch has this
    # for GPUs only, but operands on a CPU are float32 and take another branch.
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif out.dtype == torch.float32:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        out.copy_(torch.mm(a, b))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Computes total += a @ b in float32."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


def _gathered(hidden: Tensor, shard: Shard) -> Tensor:
    """All-gathers rows: [n / ranks, H] of each rank -> [n, H]."""
    whole = hidden.new_empty(len(hidden) * shard.ranks, hidden.shape[1])
    dist.all_gather_into_tensor(whole, hidden.contiguous(), group=shard.group)
    return whole


def _block(output_weight: Tensor) -> int:
    return BLOCK_GPU if output_weight.is_cuda else BLOCK_CPU


def _default_chunk(columns: int, output_weight: Tensor) -> int:
    """Rows per chunk: one block on a GPU, with 1.9 GB of logits and gradient at 151936 columns in bfloat16; on a CPU
    2 MiB of logits, or one block.
    """
    return BLOCK_GPU if output_weight.is_cuda else max(1, 2**19 // columns)
