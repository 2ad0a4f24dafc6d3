"""The output layer: from hidden states to log-probs, on the rows that carry a loss and nowhere else.

The model's output layer hands its hidden states on unchanged; logits are made here, from the local vocabulary shard,
for chosen rows only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)


class LogProbHead(ColumnParallelLinear):
    """Megatron's output layer, same parameters and checkpoint keys, whose forward returns the hidden states."""

    vocab_size: int
    tied_weight: Callable[[], torch.Tensor] | None

    def forward(self, hidden: torch.Tensor, weight: Any = None, runtime_gather_output: Any = None) -> Any:
        """[T, 1, H] -> ([T, 1, H], None); with sequence parallelism the rows of all ranks are gathered."""
        if self.sequence_parallel:  # the gather's backward reduce-scatters, as Megatron's own output layer does
            return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True), None
        return copy_to_tensor_model_parallel_region(hidden), None

    def shard_logits(self, hidden: torch.Tensor, frozen: bool = False) -> torch.Tensor:
        """[n, H] -> float32 logits of this rank's vocabulary shard; padding columns are -inf.

        A frozen head gives gradients to the hidden states only.
        """
        weight = self.tied_weight() if self.tied_weight else self.weight
        if frozen:
            weight = weight.detach()
        # Megatron hands out a bf16 model's hidden states as float32.
        logits = torch.matmul(hidden.to(weight.dtype), weight.t()).float()
        real = self.vocab_size - parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
        if real < logits.shape[-1]:
            logits[:, max(real, 0) :] = float("-inf")
        return logits

    def full_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, V] float32 logits over the tokenizer's vocabulary, on every tensor parallel rank."""
        return gather_from_tensor_model_parallel_region(self.shard_logits(hidden))[:, : self.vocab_size]

    def logprob(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, frozen: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, H] hidden states, [n] tokens -> [n] log-probs and [n] entropies (entropies without gradient)."""
        logits = self.shard_logits(hidden, frozen)
        return _VocabParallelLogProb.apply(logits if temperature == 1.0 else logits / temperature, targets)


class _VocabParallelLogProb(torch.autograd.Function):
    """log softmax(logits)[target] and the entropy, with the vocabulary split over tensor parallel ranks.

    d logprob / d logits = onehot(target) - softmax(logits).
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        group = parallel_state.get_tensor_model_parallel_group()
        peak = logits.max(-1).values
        if group.size() > 1:
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        shifted = logits - peak[:, None]
        local = targets - group.rank() * logits.shape[-1]
        mine = (local >= 0) & (local < logits.shape[-1])
        local = torch.where(mine, local, 0)
        probs = shifted.exp()
        # [3, n]: sum of exponentials, target's shifted logit, sum of exp * shifted (0 where the logit is -inf)
        parts = torch.stack([
            probs.sum(-1),
            torch.where(mine, shifted.gather(-1, local[:, None])[:, 0], 0.0),
            (probs * shifted.masked_fill(probs == 0, 0.0)).sum(-1),
        ])  # fmt: skip
        if group.size() > 1:
            dist.all_reduce(parts, group=group)
        total, target, weighted = parts
        probs /= total[:, None]
        ctx.save_for_backward(probs, local, mine)
        entropy = total.log() - weighted / total
        ctx.mark_non_differentiable(entropy)
        return target - total.log(), entropy

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        probs, local, mine = ctx.saved_tensors
        grad_logits = probs * -grad[:, None]
        grad_logits.scatter_add_(-1, local[:, None], torch.where(mine, grad, 0.0)[:, None])
        return grad_logits, None


def use_logprob_head(gpt: GPTModel, vocab_size: int) -> None:
    """Makes the last stage's output layer a `LogProbHead` over the tokenizer's `vocab_size` tokens."""
    if gpt.post_process:
        gpt.output_layer.__class__ = LogProbHead
        gpt.output_layer.vocab_size = vocab_size
        tied = gpt.share_embeddings_and_output_weights
        gpt.output_layer.tied_weight = gpt.shared_embedding_or_output_weight if tied else None
