"""The output layer: log-probs from hidden states, only for rows with a loss.

The model's output layer returns its hidden states unchanged. `grpo_kernels` computes the logits of chosen rows, a chunk
at a time, from the local vocabulary shard; a tensor [tokens, vocabulary] never exists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)

from grpo_kernels import linear_logits, linear_logprob, linear_token_loss
from grpo_mega.algorithm.objective import Loss, LossResult
from grpo_mega.types import ScoredTokens


class LogProbHead(ColumnParallelLinear):
    """Megatron's output layer, with its parameters and checkpoint keys, whose forward returns hidden states."""

    vocab_size: int
    tied_weight: Callable[[], torch.Tensor] | None

    def forward(self, hidden: torch.Tensor, weight: Any = None, runtime_gather_output: Any = None) -> Any:
        """[T, 1, H] -> ([T, 1, H], None); gathers the rows of all ranks with sequence parallelism."""
        # The backward pass of the gather reduce-scatters, as in Megatron's own output layer.
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True), None
        return copy_to_tensor_model_parallel_region(hidden), None

    def full_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 logits over the tokenizer's vocabulary, on every tensor parallel rank: [n, H] -> [n, V]."""
        logits = linear_logits(hidden, self._shard())
        return gather_from_tensor_model_parallel_region(logits)[:, : self.vocab_size]

    def logprob(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies: [n, H] hidden states and [n] tokens -> [n] and [n]."""
        return linear_logprob(hidden, self._shard(), targets, temperature=temperature, **self._vocabulary_part())

    def loss(
        self, loss: Loss, hidden: torch.Tensor, scored: ScoredTokens, temperature: float, grad_scale: float
    ) -> LossResult:
        """Loss of [n, H] hidden states, computed together with its gradients, so that logits are computed once.

        The output weight's gradient is added in float32 to Megatron's buffer, for a loss that is multiplied by
        `grad_scale` before its backward pass; a frozen weight gets none.
        """
        output_weight: Any = self._shard()
        settings = self._vocabulary_part() | {"temperature": temperature}
        # The gradient is computed in the forward pass, when autograd cannot know yet what the loss is multiplied by.
        if output_weight.requires_grad:
            settings |= {"main_grad": output_weight.main_grad, "grad_scale": grad_scale}
            output_weight = added_to_main_grad(output_weight)
        return loss(hidden, output_weight, scored, _context_parallel_group(), **settings)

    def draft_loss(self, hidden: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
        """Sum of -log-prob of [n] tokens from [n, H] hidden states, the only inputs that get a gradient."""
        # Detached: prediction modules learn from the policy and must not change it (megatron/mtp.py).
        output_weight, settings = self._shard().detach(), self._vocabulary_part() | {"temperature": temperature}
        return linear_token_loss(hidden, output_weight, tokens, lambda logprob, *_: (-logprob, {}), **settings)[0]

    def _shard(self) -> torch.Tensor:
        return self.tied_weight() if self.tied_weight else self.weight

    def _vocabulary_part(self) -> dict[str, Any]:
        """Arguments of `grpo_kernels` for this rank's vocabulary shard.

        "hidden_grad" is partial: the backward pass of `forward` sums the gradients of the hidden states over the ranks.
        """
        group = parallel_state.get_tensor_model_parallel_group()
        return {
            "vocab_size": self.vocab_size,
            "group": group if group.size() > 1 else None,
            "hidden_grad": "partial",
        }


def _context_parallel_group() -> Any:
    """The ranks that each hold some tokens of every sequence; None when this one holds whole sequences."""
    group = parallel_state.get_context_parallel_group()
    return group if group.size() > 1 else None


def use_logprob_head(gpt: GPTModel, vocab_size: int) -> None:
    """Makes the last stage's output layer a `LogProbHead` over the tokenizer's `vocab_size` tokens."""
    if gpt.post_process:
        # Only the class changes: Megatron has already sharded the weight, marked it for its optimizer and tied it to
        # the embedding, and a new module would have to repeat all of that under the same checkpoint keys.
        gpt.output_layer.__class__ = LogProbHead
        gpt.output_layer.vocab_size = vocab_size
        tied = gpt.share_embeddings_and_output_weights
        gpt.output_layer.tied_weight = gpt.shared_embedding_or_output_weight if tied else None


def added_to_main_grad(weight: torch.Tensor) -> torch.Tensor:
    """A weight matrix for a function that adds the gradient to `weight.main_grad` itself and gives autograd none."""
    return _AddedToMainGrad.apply(weight)


class _AddedToMainGrad(torch.autograd.Function):
    """Autograd function that marks a gradient as already in Megatron's buffer, as Megatron's own layers do.

    Data parallelism with overlapped reduction still needs some gradient. Its value is ignored, except with
    `zero_out_wgrad`: then an embedding on this stage adds the gradient of its own use to it.
    """

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor | None) -> torch.Tensor:
        weight = ctx.weight
        weight.grad_added_to_main_grad = True
        return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)
