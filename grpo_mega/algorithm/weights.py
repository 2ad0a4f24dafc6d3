"""What each token counts in the loss.

loss = sum(weight * token_loss), with weight = mask / denominator computed once over the global batch. How the batch
is then cut into micro-batches, packed or spread over ranks cannot change the loss: every part sums its own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def token_weights(
    mask: Tensor, cu_seqlens: Tensor, aggregation: str, constant_length: int, left_out: Sequence[int] = ()
) -> Tensor:
    """Weights that turn per-token losses of the global batch into one number by a plain sum.

    With n the number of sequences that have a masked-in token (the others count for nothing) and |o| the number of
    such tokens in a sequence, those left out included, the denominator of a masked-in token is

    - "sequence_mean": n * |o|, mean over sequences of the mean over tokens (DeepSeekMath, equation 3);
    - "token_mean": the sum of all |o| (DAPO, arXiv 2503.14476, equation 8);
    - "constant": n * constant_length (Dr. GRPO, arXiv 2503.20783, section 3.2).

    Args:
        mask: [T] bool, True on the tokens that are trained.
        cu_seqlens: [N + 1] integers, start of every sequence, and T.
        aggregation: One of the three names above.
        constant_length: Tokens every sequence is divided by; read by "constant" only.
        left_out: |o| of sequences that count in n and in the sum of all |o| although they are not in the batch, because
            their losses have no gradient. The weights here are the same as if they were in it.

    Returns:
        [T] float32; all zeros when nothing is masked in.

    Raises:
        ValueError: `cu_seqlens` does not cut `mask`, `aggregation` is unknown, or `constant_length` is needed and
            below 1.
    """
    sequence = _sequence_of_token(mask, cu_seqlens)
    tokens = torch.zeros(len(cu_seqlens) - 1, dtype=torch.int64, device=mask.device).index_add(0, sequence, mask.long())
    sequences = (tokens > 0).sum() + sum(length > 0 for length in left_out)
    if aggregation == "sequence_mean":
        denominator = sequences * tokens[sequence]
    elif aggregation == "token_mean":
        denominator = tokens.sum() + sum(left_out)
    elif aggregation == "constant":
        if constant_length < 1:
            raise ValueError(f"constant_length is {constant_length}; use the longest completion, max_new_tokens")
        denominator = sequences * constant_length
    else:
        raise ValueError(f"aggregation is {aggregation!r}; use sequence_mean, token_mean or constant")
    # A denominator is 0 only where the mask is False as well: the clamp touches no trained token.
    return (mask.double() / denominator.clamp(min=1)).float()


def _sequence_of_token(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] index of the sequence each token belongs to."""
    lengths = cu_seqlens.diff()
    if mask.dtype != torch.bool or mask.dim() != 1:
        raise ValueError(f"mask is {mask.dtype} of shape {list(mask.shape)}; it must be a bool vector")
    if cu_seqlens.numel() == 0 or cu_seqlens[0] != 0 or cu_seqlens[-1] != len(mask) or (lengths < 0).any():
        raise ValueError(f"cu_seqlens must rise from 0 to the {len(mask)} tokens of mask, got {cu_seqlens.tolist()}")
    return torch.arange(len(lengths), device=mask.device).repeat_interleave(lengths)
