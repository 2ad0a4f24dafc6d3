"""Multi-token prediction (DeepSeek-V3, section 2.2): modules after the last layer that predict further ahead.

The module of depth k takes the hidden state of a token and the embedding of the token k positions later, and predicts
the token after that. It exists to draft tokens for speculative decoding, so it must follow a policy that changes. Here
it learns from the policy's own samples and does not influence the policy: hidden states, embedding and output layer are
read without gradient, and the gradients of all other weights are those of a model without it.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

from grpo_mega.models.megatron.packed import PackedTokens


class PredictingGPT(GPTModel):
    """A GPTModel whose last stage also returns the hidden states of its prediction modules while training."""

    def _postprocess(
        self,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        *_: Any,
        packed_seq_params: PackedTokens | None = None,
        **__: Any,
    ) -> torch.Tensor:
        """[T', 1, H] -> [1 + depths, T', H], where depth 0 is the model itself; [1, T', H] without gradients.

        Stages before the last return their input.
        """
        if not self.post_process:
            return hidden_states
        states = [hidden_states]
        if torch.is_grad_enabled():
            ahead = self.mtp(
                input_ids=input_ids,
                position_ids=position_ids,
                hidden_states=hidden_states.detach(),
                attention_mask=None,
                packed_seq_params=packed_seq_params,
                embedding=self.embedding,
            )
            # Megatron returns the states that it was given before those of the modules. They are detached here, so the
            # model's own take their place.
            states += ahead.chunk(1 + self.config.mtp_num_layers)[1:]
        return torch.cat([self.output_layer(state)[0].transpose(0, 1) for state in states])


class PackedPredictor(MultiTokenPredictionLayer):
    """Megatron's prediction module, which takes the next tokens from `PackedTokens.ahead`.

    Megatron shifts the flat row by one: at the end of a sequence that reads the next one's first token, and after a
    shared prompt only the first of several continuations.
    """

    def _get_embeddings(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        embedding: Any,
        hidden_states: torch.Tensor,
        packed_seq_params: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        ahead = packed_seq_params.ahead[None, self.layer_number - 1]
        embedded = embedding(input_ids=ahead, position_ids=position_ids)
        return input_ids, position_ids, _NoGradient.apply(embedded), hidden_states

    def _checkpointed_forward(self, forward_func: Any, *_: Any, **arguments: Any) -> torch.Tensor:
        # Megatron's own method passes every argument to autograd, which can save tensors only.
        hidden_states, decoder_input = arguments.pop("hidden_states"), arguments.pop("decoder_input")

        def forward(hidden_states: torch.Tensor, decoder_input: torch.Tensor) -> torch.Tensor:
            return forward_func(hidden_states=hidden_states, decoder_input=decoder_input, **arguments)

        return checkpoint(forward, False, hidden_states, decoder_input)


class _NoGradient(torch.autograd.Function):
    """Identity whose gradient is zeros.

    A detached embedding would get no gradient on a last stage that has a copy of it for this purpose alone, but
    Megatron's overlapped reduction waits for a gradient of every parameter.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(grad)


def use_packed_predictors(gpt: torch.nn.Module) -> None:
    """Changes the class of every prediction module to PackedPredictor."""
    for module in gpt.modules():
        if type(module) is MultiTokenPredictionLayer:
            module.__class__ = PackedPredictor
