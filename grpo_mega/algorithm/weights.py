"""Weight of each token in the loss.

loss = sum(weight * token_loss), with weight = mask / denominator, where the denominator is over the global batch. So
the loss does not depend on micro-batches, packing or the split over ranks: every part sums its own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def token_weights(
    mask: Tensor, cu_seqlens: Tensor, aggregation: str, constant_length: int, counted: Sequence[int] | None = None
) -> Tensor:
    """Token weights with which the loss of the global batch is the plain sum of weight * token loss.

    With |o| the number of masked-in tokens of a sequence and n the number of sequences of the global batch that have
    any (the others do not count), the denominator of a masked-in token is

    - "sequence_mean": n * |o|, mean over sequences of the mean over tokens (DeepSeekMath, equation 3);
    - "token_mean": the sum of all |o| (DAPO, arXiv 2503.14476, equation 8);
    - "constant": n * constant_length (Dr. GRPO, arXiv 2503.20783, section 3.2).

    Args:
        mask: [T] bool, True on trained tokens; of some of the sequences, such as those of one rank.
        cu_seqlens: [N + 1] integers, start of every sequence in `mask`, then T.
        aggregation: One of the three names above.
        constant_length: Length in tokens that "constant" divides by.
        counted: |o| of every sequence of the global batch, in any order: these N, those of other ranks, and those that
            no rank computes because their losses have no gradient. None when there are only these N.

    Returns:
        [T] float32; all zeros when nothing is masked in.

    Raises:
        ValueError: `cu_seqlens` does not cut `mask`, `aggregation` is unknown, or `constant_length` is needed and
            below 1.
    """
    lengths = cu_seqlens.diff()
    if mask.dtype != torch.bool or mask.dim() != 1:
        raise ValueError(f"mask is {mask.dtype} of shape {list(mask.shape)}; it must be a bool vector")
    if cu_seqlens.numel() == 0 or cu_seqlens[0] != 0 or cu_seqlens[-1] != len(mask) or (lengths < 0).any():
        raise ValueError(f"cu_seqlens must rise from 0 to the {len(mask)} tokens of mask, got {cu_seqlens.tolist()}")
    sequence = torch.arange(len(lengths), device=mask.device).repeat_interleave(lengths)
    tokens = torch.zeros(len(lengths), dtype=torch.int64, device=mask.device).index_add(0, sequence, mask.long())
    counted = tokens.tolist() if counted is None else counted
    sequences = sum(length > 0 for length in counted)
    if aggregation == "sequence_mean":
        denominator = sequences * tokens
    elif aggregation == "token_mean":
        denominator = torch.full_like(tokens, sum(counted))
    elif aggregation == "constant":
        if constant_length < 1:
            raise ValueError(f"constant_length is {constant_length}; use the longest completion, max_new_tokens")
        denominator = torch.full_like(tokens, sequences * constant_length)
    else:
        raise ValueError(f"aggregation is {aggregation!r}; use sequence_mean, token_mean or constant")
    # A denominator is 0 only where the mask is False as well, so the clamp changes no trained token. The division is in
    # float64, because float32 does not hold every count of tokens above 2^24.
    of_token = (1.0 / denominator.clamp(min=1).double()).float()
    return torch.where(mask, of_token[sequence], 0.0)
