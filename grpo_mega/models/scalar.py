"""A model that gives one number for each token: a critic's value, a reward model's score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from grpo_mega.config.schema import LayoutConfig, ModelConfig
from grpo_mega.models.losses import mean_over, of_all
from grpo_mega.models.microbatch import MicroBatch, MicroBatches, ScoredTokens, micro_batches
from grpo_mega.models.model import MicroLoss, Model, Pass
from grpo_mega.models.topology import Topology
from grpo_mega.platform import Platform
from grpo_mega.types import Batch

ScalarLoss = Callable[[torch.Tensor, ScoredTokens], torch.Tensor]
"""(values [n], what is known about their tokens) -> loss of each token [n], not yet multiplied by its weight."""


@dataclass(frozen=True)
class SquaredError:
    """(value - target)^2 of each token, as critics are trained (PPO: Schulman et al., 2017, equation 9).

    Attributes:
        targets: [T] aligned with the tokens of the whole batch.
    """

    targets: torch.Tensor

    def __call__(self, values: torch.Tensor, scored: ScoredTokens) -> torch.Tensor:
        """[n] values -> [n] losses."""
        return (values - self.targets.to(values.device)[scored.index]).square()


class ScalarModel(Model):
    """A Megatron body whose head makes a number of each token's hidden state; it has no language model's head.

    `values[j]` has read the tokens of its sequence up to and including `tokens[j]`: it is the value of the state after
    that token, and the last of a sequence is what a reward model says of the whole. To begin with a language model's
    body, load its checkpoint within `chunks.body_alone()`: names and shapes of the body are the same.
    """

    def __init__(
        self,
        role: str,
        model: ModelConfig,
        layout: LayoutConfig,
        vocab_size: int,
        topology: Topology,
        platform: Platform,
        distributed_optimizer: bool = False,
        overlap: bool = False,
        bucket_size: int | None = None,
    ) -> None:
        """The body is that of a language model of this configuration, without its prediction modules; see `Model`."""
        parallel = (distributed_optimizer, overlap, bucket_size)
        super().__init__(role, body_of(model), layout, vocab_size, topology, platform, *parallel, scalar=True)

    def values(self, batch: Batch) -> torch.Tensor:
        """[T] float32 values of all tokens, prompts included, whole on every rank. No gradient."""
        everything = batch.with_(mask=torch.ones_like(batch.mask))
        return self._scored(self._micro_batches(everything), lambda micro, values: values[0, micro.rows])

    def gradients(self, batch: Batch, loss: ScalarLoss) -> Pass:
        """Forward and backward of sum(weight * loss) over the tokens masked in; "value" is their mean in the metrics.

        Raises:
            FloatingPointError: The loss of a scored token is not finite; names the sequence and the token. Or a
                gradient is not; names the parameter.
        """

        def of_micro_batch(micro: MicroBatch, values: torch.Tensor) -> MicroLoss:
            scored = values[0, micro.rows]
            losses = micro.scored.weight * loss(scored, micro.scored)
            total = losses.sum()
            mean = mean_over(scored.detach().sum(), torch.ones_like(scored).sum())
            return MicroLoss(total, losses, scored, {"loss": of_all(total.detach()), "value": mean})

        return self._backward(self._micro_batches(batch), of_micro_batch)

    def update(self, batch: Batch, loss: ScalarLoss, lr: float) -> Pass:
        """One optimizer update; "grad_norm" (before clipping) and "lr" join the metrics."""
        assert self.optimizer is not None, "call use_optimizer before update"
        found = self.gradients(batch, loss)
        found.metrics |= self._step(lr)
        return found

    def _micro_batches(self, batch: Batch) -> MicroBatches:
        return micro_batches(batch, self.topology, self._budget, self.platform.device, own=True)


def body_of(model: ModelConfig) -> ModelConfig:
    """The configuration without what belongs to a language model's head: tied embeddings, prediction modules."""
    return replace(model, tie_embeddings=False, mtp_layers=0)
