"""The output layer: from hidden states to log-probs, on the rows that carry a loss and nowhere else.

The model's output layer hands its hidden states on unchanged. `grpo_kernels` makes logits of chosen rows, a chunk at a
time, from the local vocabulary shard; [tokens, vocabulary] never exists.
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

ScoredLoss = Callable[[torch.Tensor, torch.Tensor, slice], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""(log-probs [r], entropies [r], which of the n rows these are) -> (loss of each [r], whatever else is wanted, [r])."""


class LogProbHead(ColumnParallelLinear):
    """Megatron's output layer, same parameters and checkpoint keys, whose forward returns the hidden states."""

    vocab_size: int
    tied_weight: Callable[[], torch.Tensor] | None

    def forward(self, hidden: torch.Tensor, weight: Any = None, runtime_gather_output: Any = None) -> Any:
        """[T, 1, H] -> ([T, 1, H], None); with sequence parallelism the rows of all ranks are gathered."""
        if self.sequence_parallel:  # the gather's backward reduce-scatters, as Megatron's own output layer does
            return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True), None
        return copy_to_tensor_model_parallel_region(hidden), None

    def full_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, V] float32 logits over the tokenizer's vocabulary, on every tensor parallel rank."""
        logits = linear_logits(hidden, self._shard())
        return gather_from_tensor_model_parallel_region(logits)[:, : self.vocab_size]

    def logprob(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, H] hidden states, [n] tokens -> [n] log-probs and [n] entropies."""
        return linear_logprob(hidden, self._shard(), targets, temperature=temperature, **self._place())

    def token_loss(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        loss: ScoredLoss,
        frozen: bool = False,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The sum of `loss` over [n, H] hidden states and their [n] tokens, and what `loss` returned besides, each [n].

        Gradients are made with the loss, so the logits are made once. A frozen head gives gradients to the hidden
        states only.
        """
        weight = self._shard().detach() if frozen else self._shard()
        return linear_token_loss(hidden, weight, targets, loss, temperature=temperature, **self._place())

    def _shard(self) -> torch.Tensor:
        return self.tied_weight() if self.tied_weight else self.weight

    def _place(self) -> dict[str, Any]:
        """Which part of the vocabulary this rank holds; `forward` sums the parts of the hidden states' gradient."""
        group = parallel_state.get_tensor_model_parallel_group()
        return {
            "vocab_size": self.vocab_size,
            "group": group if group.size() > 1 else None,
            "hidden_grad": "partial",
        }


def use_logprob_head(gpt: GPTModel, vocab_size: int) -> None:
    """Makes the last stage's output layer a `LogProbHead` over the tokenizer's `vocab_size` tokens."""
    if gpt.post_process:
        gpt.output_layer.__class__ = LogProbHead
        gpt.output_layer.vocab_size = vocab_size
        tied = gpt.share_embeddings_and_output_weights
        gpt.output_layer.tied_weight = gpt.shared_embedding_or_output_weight if tied else None
