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
from grpo_kernels.rows import logprob_and_entropy
from grpo_kernels.vocab_parallel import Shard, shard_of

HIDDEN_GRADS = ("all_reduce", "reduce_scatter", "partial")

BLOCK_CPU, BLOCK_GPU = 64, 2048
"""Rows of a block. On a GPU adding a block's product to the weight's gradient reads and writes 8 V H bytes, which takes
less time than its 4096 V H operations; on a CPU the fewest that cost nothing."""


class How(TypedDict, total=False):
    """Keyword arguments that all linear functions share; `head` has the defaults, `linear.py` says what they mean."""

    temperature: float
    chunk: int | None
    logits_dtype: torch.dtype
    vocab_size: int | None
    group: dist.ProcessGroup | None
    hidden_grad: str
    backend: str | None


@dataclass(frozen=True)
class Head:
    """What a call does with its output layer."""

    shard: Shard
    inv_temperature: float
    chunk: int
    logits_dtype: torch.dtype
    hidden_grad: str
    operations: Any

    def chunks(self, count: int) -> Iterator[slice]:
        """Slices of `count` rows, each but the last of whole blocks; one empty slice when there is none."""
        return (slice(start, min(start + self.chunk, count)) for start in range(0, max(count, 1), self.chunk))

    def operands(self, hidden: Tensor, weight: Tensor) -> Operands:
        """What the products are made of: [n, H] rows of all ranks and [columns, H] weight without padding."""
        hidden, weight = hidden.detach().to(weight.dtype), weight.detach()[: self.shard.columns]
        return Operands.of(_gathered(hidden, self.shard) if self.gathers else hidden, weight)

    def local_stats(self, logits: Tensor, ids: Tensor) -> Tensor:
        """[r, 4] statistics of a chunk's logits and its global ids [r], of this rank's columns."""
        return self.operations.row_stats(logits, self._local(ids), None, self.shard.columns, self.inv_temperature)

    def merged(self, stats: Tensor) -> Tensor:
        """[r, 4] of this rank's columns -> of whole rows; every rank must call it."""
        return self.shard.merged(stats, self.inv_temperature)

    def logprob_and_entropy(self, stats: Tensor) -> tuple[Tensor, Tensor]:
        """[r] and [r], from merged statistics."""
        return logprob_and_entropy(stats, self.inv_temperature)

    def gradient(
        self,
        operands: Operands,
        logits: Tensor,
        ids: Tensor,
        stats: Tensor,
        by_logprob: Tensor,
        by_entropy: Tensor | None,
    ) -> Tensor:
        """[r, columns] gradient of the chunk's logits, in the operands' dtype; the logits are given up."""
        same = logits.dtype == operands.hidden.dtype
        out = logits if same else torch.empty_like(logits, dtype=operands.hidden.dtype)
        self.operations.row_gradient_(
            logits,
            self._local(ids),
            None,
            self.shard.columns,
            self.inv_temperature,
            stats,
            by_logprob.contiguous(),
            None if by_entropy is None else by_entropy.contiguous(),
            "leave",
            out=out,
        )
        return out

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

    def _local(self, ids: Tensor) -> Tensor:
        return ids - self.shard.start if self.shard.start else ids

    @property
    def gathers(self) -> bool:
        """Whether `hidden` is this rank's part of the rows."""
        return self.hidden_grad == "reduce_scatter" and self.shard.ranks > 1


def head(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    logits_dtype: torch.dtype = torch.float32,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    hidden_grad: str = "all_reduce",
    backend: str | None = None,
) -> Head:
    """Checks the arguments and decides what is left open.

    Raises:
        ValueError, TypeError: An argument is bad; names it.
    """
    checks.require_linear(hidden, weight)
    checks.require_group(group)
    checks.require_temperature(temperature)
    checks.require_one_of("hidden_grad", hidden_grad, HIDDEN_GRADS)
    checks.require_one_of("logits_dtype", logits_dtype, (torch.float32, torch.bfloat16))
    checks.require_chunk(chunk)
    shard = shard_of(len(weight), vocab_size, group)
    if chunk is None:  # from a width that all ranks have in common: they exchange something for every chunk
        chunk = _default_chunk(-(-shard.vocab_size // shard.ranks), weight)
    block = _block(weight)
    chunk = -(-chunk // block) * block
    operations = choose_backend(weight, backend).operations
    made = Head(shard, 1.0 / temperature, chunk, logits_dtype, hidden_grad, operations)
    checks.require_ids(ids, len(hidden) * (shard.ranks if made.gathers else 1), hidden.device, shard.vocab_size)
    return made


@dataclass
class Operands:
    """What is multiplied: [n, H] hidden states and [columns, H] weight, of one dtype."""

    hidden: Tensor
    weight: Tensor

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor) -> Operands:
        """Hidden states rounded to the weight's dtype; float32 on a CPU, whose product of bfloat16 rounds its sums."""
        hidden = hidden.to(weight.dtype)
        return cls(hidden, weight) if weight.is_cuda else cls(hidden.float(), weight.float())

    def logits(self, part: slice, dtype: torch.dtype) -> Tensor:
        """[r, columns] logits of some rows, counted from the beginning of a block."""
        rows = self.hidden[part]
        out = torch.empty(len(rows), len(self.weight), dtype=dtype, device=rows.device)
        for block in self.blocks(len(rows)):
            _multiply(rows[block], self.weight.t(), out[block])
        return out

    def blocks(self, count: int) -> Iterator[slice]:
        """Slices of `count` rows."""
        size = _block(self.weight)
        return (slice(start, start + size) for start in range(0, count, size))


@dataclass
class Gradients:
    """Where gradients add up; None for those that nobody wants.

    Attributes:
        hidden: [n, H], every row written once.
        weight: [V, H] float32, of which the padding stays as it is.
    """

    hidden: Tensor | None
    weight: Tensor | None

    @classmethod
    def wanted(cls, operands: Operands, hidden: Tensor, weight: Tensor, main_grad: Tensor | None = None) -> Gradients:
        """For the tensors that require one; the weight's goes to `main_grad` when that is given."""
        rows, total = None, None
        if hidden.requires_grad:
            rows = torch.empty_like(operands.hidden, dtype=hidden.dtype)
        if weight.requires_grad:
            total = torch.zeros_like(weight, dtype=torch.float32) if main_grad is None else main_grad
        return cls(rows, total)

    def add(self, operands: Operands, part: slice, grad_logits: Tensor, counted: Tensor) -> None:
        """Adds what the gradient [r, columns] of some rows' logits gives, in the operands' dtype.

        Rows that are not `counted` [r], whose gradient is 0, may hold anything, NaN included.
        """
        hidden = operands.hidden[part]
        for block in operands.blocks(len(hidden)):
            if self.hidden is not None:
                _multiply(grad_logits[block], operands.weight, self.hidden[part][block])
            if self.weight is not None:
                rows = torch.where(counted[block, None], hidden[block], 0)
                _add_product(self.weight[: len(operands.weight)], grad_logits[block].t(), rows)


def counted(by_logprob: Tensor, by_entropy: Tensor | None) -> Tensor:
    """[r] whether a row has a gradient."""
    return by_logprob != 0 if by_entropy is None else (by_logprob != 0) | (by_entropy != 0)


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


def _block(weight: Tensor) -> int:
    return BLOCK_GPU if weight.is_cuda else BLOCK_CPU


def _default_chunk(columns: int, weight: Tensor) -> int:
    """One block on a GPU, 1.9 GB of logits and gradient at 151936 columns in bfloat16; on a CPU 2 MiB of logits, or one
    block.
    """
    return BLOCK_GPU if weight.is_cuda else max(1, 2**19 // columns)
