"""Models with one number per token: a critic's value, a reward model's score."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain

import torch
import torch.distributed as dist
import torch.nn.functional as F

from grpo_mega.algorithm.objective import logged_mean, logged_sum
from grpo_mega.config.schema import LayoutConfig, ModelConfig, OptimizerConfig
from grpo_mega.models.microbatch import MicroBatch, MicroBatches
from grpo_mega.models.model import NOT_SHARDED, MicroLoss, Model, Pass
from grpo_mega.models.topology import Topology
from grpo_mega.platform import Platform
from grpo_mega.types import Batch, ScoredTokens

REWARD_MODEL = "reward model"
"""Role of a model that scores whole responses."""

ScalarLoss = Callable[[torch.Tensor, ScoredTokens], torch.Tensor]
"""(values [n], their tokens) -> loss of each token [n], not yet multiplied by its weight."""

NOTHING: Mapping[str, ScalarLoss] = {}


@dataclass(frozen=True)
class ClippedSquaredError:
    """max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2 of each token: the loss of PPO's critic.

    A critic's value moves at most `clip` from its value before the step's updates, similar to the policy's ratio
    (published with PPO's code, and in Huang et al., 2022, The 37 Implementation Details of Proximal Policy
    Optimization, detail 9). R is the column `returns`, V_old the column `value`.

    Attributes:
        clip: The largest change that lowers the loss; None for a plain squared error.
    """

    clip: float | None

    def __call__(self, values: torch.Tensor, scored: ScoredTokens) -> torch.Tensor:
        """[n] values of the scored tokens -> [n] losses."""
        assert scored.returns is not None, "a critic is trained on batches with returns"
        assert scored.value is not None, "a critic is trained on batches with its earlier values"
        error = (values - scored.returns).square()
        if self.clip is not None:
            near = scored.value + (values - scored.value).clamp(-self.clip, self.clip)
            # The larger of the two: a step that overshoots the clip towards the target earns nothing, one away from it
            # still costs.
            error = torch.maximum(error, (near - scored.returns).square())
        return error / 2


def cross_entropy(values: torch.Tensor, scored: ScoredTokens) -> torch.Tensor:
    """[n] values, the logits of being right -> [n] -y log sigmoid(v) - (1 - y) log sigmoid(-v), y the column `returns`,
    from 0 to 1: the loss of a process reward model (`algorithm/process_reward.py`)."""
    assert scored.returns is not None, "labels are learned from batches with returns"
    return F.binary_cross_entropy_with_logits(values, scored.returns, reduction="none")


def right_side(values: torch.Tensor, scored: ScoredTokens) -> torch.Tensor:
    """[n] values -> [n] 1 where value and label are on the same side of one half, else 0; see `cross_entropy`."""
    assert scored.returns is not None, "labels are learned from batches with returns"
    return ((values >= 0) == (scored.returns >= 0.5)).to(values.dtype)


def value_itself(values: torch.Tensor, scored: ScoredTokens) -> torch.Tensor:
    """[n] values -> the same as a loss, so that the objective is sum(weight * value).

    With the derivatives of a loss of all values as weights, the objective has the gradient of that loss.
    """
    return values


class ScalarModel(Model):
    """A Megatron body with a head that maps each token's hidden state to a number, in place of a language model's head.

    `values[j]` depends on the tokens of its sequence up to and including `tokens[j]`: it is the value of the state
    after that token, and the last value of a sequence is a reward model's score of it. With `before`, it depends only
    on the tokens before `tokens[j]`: the value of the state in which the token is chosen, as for a critic.
    """

    scalar = True

    def __init__(
        self,
        role: str,
        model: ModelConfig,
        layout: LayoutConfig,
        vocab_size: int,
        topology: Topology,
        platform: Platform,
        *,
        optimizer: OptimizerConfig | None = NOT_SHARDED,
        before: bool = False,
        bucket_size: int | None = None,
    ) -> None:
        """The body is that of a language model of this configuration, without its prediction modules.

        Use `optimizer=None` for a reward model that only scores. For `before` see the class, for the other arguments
        `Model`.
        """
        super().__init__(
            body_of(model), layout, vocab_size, topology, platform, optimizer=optimizer, bucket_size=bucket_size
        )
        self.role, self.before = role, before

    @torch.no_grad()
    def take_body(self, policy: Model) -> None:
        """Copies the body of a language model of the same configuration and layout. The head is set to 0, so that all
        values are 0 until it is trained.

        (A body from a checkpoint is loaded within `chunks.body_alone()`: names and shapes are the same.)
        """
        policy.gather_parameters()
        theirs = dict(chain(policy.chunks.named_parameters(), policy.chunks.named_buffers()))
        for name, tensor in chain(self.chunks.named_parameters(), self.chunks.named_buffers()):
            tensor.zero_() if "scalar_head" in name else tensor.copy_(theirs[name])

    @torch.no_grad()
    def reset_head(self) -> None:
        """Sets the head to 0, so that all values are 0."""
        for name, parameter in self.chunks.named_parameters():
            if "scalar_head" in name:
                parameter.zero_()

    def values(self, batch: Batch) -> torch.Tensor:
        """[T] float32 values, complete on all ranks of the replica; no gradients.

        Of all tokens, prompts included; with `before`, of the masked-in tokens, and 0 elsewhere.
        """
        # Every token has a state after it, those of prompts included; the first token of a sequence has none before it.
        everything = batch if self.before else batch.with_(mask=torch.ones_like(batch.mask))
        return self._scored(self._cut(everything), lambda micro, values: values[0, micro.rows])

    def scores(self, batch: Batch, count: int) -> torch.Tensor:
        """[count] float64 scores (values at the last tokens) of a global batch's sequences, by number.

        Complete on every rank; every rank must call it, with its replica's part of the batch. No gradients.
        """
        # Every replica fills in its own sequences, so the sum over replicas is complete.
        scores = torch.zeros(count, dtype=torch.float64)
        scores[batch.numbers] = self.values(batch)[batch.cu_seqlens[1:] - 1].double()
        if self.topology.replicas is not None:
            dist.all_reduce(scores, group=self.topology.replicas)
        return scores

    def masked_scores(self, batch: Batch) -> dict[int, list[tuple[int, float]]]:
        """{sequence number: (index in the sequence, value) of each masked-in token} of a global batch.

        Complete on every rank; every rank must call it, with its replica's part of the batch. No gradients.
        """
        lengths = batch.lengths.tolist()
        of_sequences = zip(self.values(batch).split(lengths), batch.mask.split(lengths), strict=True)
        mine = {
            number: [(i, float(values[i])) for i in mask.nonzero().flatten().tolist()]
            for number, (values, mask) in zip(batch.numbers.tolist(), of_sequences, strict=True)
        }
        parts = [mine] * self.topology.dp_size
        if self.topology.replicas is not None:
            dist.all_gather_object(parts, mine, group=self.topology.replicas)
        return {number: scores for part in parts for number, scores in part.items()}

    def gradients(self, batch: Batch, loss: ScalarLoss, also: Mapping[str, ScalarLoss] = NOTHING) -> Pass:
        """Forward and backward of sum(weight * loss) over the masked-in tokens; metric "value": their mean value.

        `also` has further metrics: name -> function that is summed like the loss.

        Raises:
            FloatingPointError: The loss of a scored token is not finite; names the sequence and the token. Or a
                gradient is not; names the parameter.
        """

        def of_micro_batch(micro: MicroBatch, values: torch.Tensor) -> MicroLoss:
            scored = values[0, micro.rows]
            losses = micro.scored.weight * loss(scored, micro.scored)
            total = losses.sum()
            mean = logged_mean(scored.detach().sum(), torch.ones_like(scored).sum())
            further = {
                name: logged_sum((micro.scored.weight * each(scored.detach(), micro.scored)).sum())
                for name, each in also.items()
            }
            return MicroLoss(total, losses, scored, {"loss": logged_sum(total.detach()), "value": mean} | further)

        return self._backward(self._cut(batch), of_micro_batch)

    def update(self, batch: Batch, loss: ScalarLoss, lr: float) -> Pass:
        """One optimizer update along the gradients of the loss; see `gradients` and `apply`."""
        return self.apply(self.gradients(batch, loss), lr)

    def _cut(self, batch: Batch) -> MicroBatches:
        # The engine's choices of experts are those of the policy; this model has its own router.
        batch = batch.with_(experts=None)
        return self._micro_batches(batch, own_state=not self.before)


def body_of(model: ModelConfig) -> ModelConfig:
    """The configuration without parts of a language model's head: tied embeddings, prediction modules."""
    return replace(model, tie_embeddings=False, mtp_layers=0)
