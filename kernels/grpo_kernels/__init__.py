"""Log-probs and losses for GRPO: fused, exact, and with a vocabulary sharded over tensor parallel ranks.

Needs only torch; triton where there is a GPU. From logits: `fused_logprob`, `fused_grpo_loss`. From hidden states,
without materialising [tokens, vocabulary]: `linear_logprob`, `linear_grpo_loss`, and `linear_token_loss` for any other
loss.
"""

from grpo_kernels.dispatch import Backend, backend
from grpo_kernels.linear import linear_grpo_loss, linear_logprob, linear_token_loss
from grpo_kernels.logits import linear_logits
from grpo_kernels.logprob import fused_logprob
from grpo_kernels.loss import fused_grpo_loss
from grpo_kernels.metrics import Metrics
from grpo_kernels.options import LossOptions

__all__ = [
    "Backend",
    "LossOptions",
    "Metrics",
    "backend",
    "fused_grpo_loss",
    "fused_logprob",
    "linear_grpo_loss",
    "linear_logits",
    "linear_logprob",
    "linear_token_loss",
]
