"""A GPTModel with one number for each token instead of logits: a critic's value, a reward model's score."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig


class ScalarHead(torch.nn.Module):
    """The product of a hidden state with one weight vector, which is the same on every tensor parallel rank.

    Under sequence parallelism a rank has a part of the rows, and so a part of the weight's gradient: the weight is
    marked for Megatron to sum it.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.gathers = config.sequence_parallel

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T', 1, H] -> [1, T'] float32; with sequence parallelism the values of all ranks' rows are gathered."""
        values = F.linear(hidden[:, 0].float(), self.weight.float())[:, 0]
        # Every rank computes the same loss from all values, so the backward pass takes its own part of a whole gradient
        # and must not sum.
        if self.gathers:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values[None]


class ScalarGPT(GPTModel):
    """A GPTModel whose last stage ends in a `ScalarHead`, and has no output layer.

    It is built as a stage that is not the last; then the final norm and the head of a last stage are added.
    """

    def __init__(self, config: TransformerConfig, post_process: bool, **others: Any) -> None:
        # With post_process=True, GPTModel would build an output layer as large as the vocabulary.
        super().__init__(config=config, post_process=False, **others)
        self.post_process = self.decoder.post_process = post_process
        if post_process:
            self.decoder.final_layernorm = build_module(
                self.decoder.submodules.layer_norm,
                config=config,
                hidden_size=config.hidden_size,
                eps=config.layernorm_epsilon,
            )
            self.scalar_head = ScalarHead(config)

    def _postprocess(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """[T', 1, H] -> [1, T'] on the last stage; stages before it return their input."""
        return self.scalar_head(hidden_states) if self.post_process else hidden_states

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The tensors by key; keys of the body are a language model's, whose own method requires an output layer."""
        return MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)
