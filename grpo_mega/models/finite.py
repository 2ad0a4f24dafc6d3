"""Refuses losses and gradients that are not finite, before they reach a weight; the error names their location.

Megatron's own check (`check_for_nan_in_grad`) checks every bucket before its reduction and waits for the GPU twice each
time, which prevents overlap with the backward pass. Here one number is checked after the backward pass. The norm for
clipping does not suffice: it leaves out the prediction modules, and is known only after the update.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from grpo_mega.models.chunks import ModelChunks
from grpo_mega.types import Batch

NAMED = 3
"""Number of parameters that an error names."""


@torch.no_grad()
def refuse_non_finite_gradients(gpt: ModelChunks, model: list[DistributedDataParallel]) -> None:
    """Checks all gradients of all ranks, each of which must call it; waits for a GPU once.

    Raises:
        FloatingPointError: On every rank, when one has a gradient that is NaN, infinite, or too large for the fp32 norm
            of the clipping; names parameters and ranks.
    """
    buffers = [buffer.grad_data for chunk in model for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    # A rank may have frozen parameters only, and must still take part in the sum.
    nothing = torch.zeros((), device=next(gpt.parameters()).device)
    norms = [nothing, *(torch.linalg.vector_norm(gradient) for gradient in buffers)]
    # Sums in fp64 cannot overflow, and a number that is not finite on one rank is not finite in the sum.
    squares = torch.stack(norms).double().square().sum()
    dist.all_reduce(squares)
    # Every comparison with NaN is False, so NaN does not pass. All ranks have the same sum: all of them raise, or none.
    if squares.item() < torch.finfo(torch.float32).max:
        return
    raise FloatingPointError(
        f"the gradient is not finite, or too large for its norm: {_named(gpt)}. No weight was changed; look at the "
        "metrics of the steps before, and fork from a checkpoint before them (run.fork) with a lower optimizer.lr"
    )


def _named(gpt: ModelChunks) -> str:
    """Parameters with a gradient that is not finite on some rank; if there are none, the one with the largest."""
    trained = {name: p.main_grad for name, p in gpt.named_parameters() if p.requires_grad}
    local = {name: torch.linalg.vector_norm(grad, float("inf")).item() for name, grad in trained.items()}
    gathered: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, local)
    gradients = [(size, name, rank) for rank, sizes in enumerate(gathered) for name, size in sizes.items()]
    # Reversed, so that of several ranks with the same parameter the lowest is named.
    bad = {name: (size, name, rank) for size, name, rank in reversed(gradients) if not math.isfinite(size)}
    worst = sorted(bad.values(), key=lambda item: item[2]) or [max(gradients)]
    more = f" and {len(worst) - NAMED} more" if len(worst) > NAMED else ""
    return ", ".join(f"{name} (up to {size:.3g}, rank {rank})" for size, name, rank in worst[:NAMED]) + more


def refuse_non_finite_losses(losses: torch.Tensor, index: torch.Tensor, batch: Batch) -> None:
    """Checks the losses [n] of the tokens at [n] indices of the batch; waits for the GPU, once per micro-batch.

    Raises:
        FloatingPointError: A loss is NaN or infinite; names the sequence and the token.
    """
    bad = ~torch.isfinite(losses)
    if bad.any():
        token = int(index[bad][0])
        number = batch.numbers[torch.searchsorted(batch.cu_seqlens, token, right=True) - 1]
        # A batch in pieces has several sequences of one number, which adjoin.
        start = int(batch.cu_seqlens[:-1][batch.numbers == number][0])
        raise FloatingPointError(
            f"the loss of token {token - start} of sequence {int(number)} of the batch is "
            f"{losses[bad][0].item()}; look at its log-prob and advantage (or value and target), and lower "
            "the learning rate if the model diverged"
        )
