"""The policy: log-probs of packed batches, and updates from a loss of log-probs, under any layout."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from grpo_mega.algorithm.objective import Loss, logged_mean, logged_sum
from grpo_mega.models.heads import LogProbHead
from grpo_mega.models.megatron.packed import PackedTokens
from grpo_mega.models.microbatch import MicroBatch
from grpo_mega.models.model import MicroLoss, Model, Pass
from grpo_mega.types import Batch


class Policy(Model):
    """A trained language model; its head gives the log-prob of every token given those before it."""

    role = "policy"

    @property
    def head(self) -> LogProbHead:
        """The output layer; only the last pipeline stage has one."""
        return self.chunks.last.output_layer

    def logprobs(self, batch: Batch, temperature: float) -> torch.Tensor:
        """[T] log-prob of every masked-in token, 0 elsewhere, complete on all ranks of the replica; no gradients."""

        def score(micro: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
            return self.head.logprob(hidden[0, micro.rows], micro.scored.tokens, temperature)[0]

        return self._scored(self._micro_batches(batch), score)

    def gradients(self, batch: Batch, loss: Loss, temperature: float = 1.0) -> Pass:
        """Forward and backward pass of the loss over all replicas' batches; the outputs are log-probs.

        Raises:
            FloatingPointError: The loss of a scored token is not finite; names the sequence and the token. Or a
                gradient is not; names the parameter.
        """
        micros = self._micro_batches(batch, self.architecture.mtp_layers)
        trained = max(micros.totals.scored, 1)

        def of_micro_batch(micro: MicroBatch, hidden: torch.Tensor) -> MicroLoss:
            # What Megatron will multiply this loss by: it averages over micro-batches and sums over context ranks.
            grad_scale = micro.packed.loss_scale * self.topology.cp_size / len(micros)
            result = self.head.loss(loss, hidden[0, micro.rows], micro.scored, temperature, grad_scale)
            total, means = result.total, result.means | {"loss": logged_sum(result.total.detach())}
            if micro.ahead:
                # Sums of -log-probs of the scored tokens under the prediction modules; the loss is their mean.
                of_depths = [
                    self.head.draft_loss(hidden[depth, ahead.rows], ahead.tokens, temperature)
                    for depth, ahead in enumerate(micro.ahead, start=1)
                ]
                drafts = torch.stack(of_depths).mean()
                # Divided by the tokens of the whole batch, so that the split into micro-batches does not matter.
                total = total + self.architecture.mtp_loss_coef * drafts / trained
                means["mtp_loss"] = logged_mean(drafts.detach(), torch.ones_like(micro.scored.tokens).sum())
            return MicroLoss(total, result.losses, result.logprob, means, result.entropies)

        return self._backward(micros, of_micro_batch)

    def update(self, batch: Batch, loss: Loss, lr: float, temperature: float = 1.0) -> Pass:
        """One optimizer update along the gradients of the loss; see `gradients` and `apply`."""
        return self.apply(self.gradients(batch, loss, temperature), lr)

    def hidden_states(self, tokens: torch.Tensor, packed: PackedTokens) -> torch.Tensor | None:
        """[T', H] last hidden states of packed tokens [T'], on the last pipeline stage; None on the others.

        The batch passes through the stages without Megatron's schedule, which needs several batches when stages are
        interleaved, while a decoding step has only one.
        """
        # Every context parallel rank generates its own sequences; Megatron expects the rows of all of them.
        packed = packed.counted_by(self.topology.cp_size)
        stages, hidden = self.topology.pp_size * len(self.ddp_chunks), None
        for stage in range(stages):
            chunk, rank = divmod(stage, self.topology.pp_size)
            if rank == self.topology.pp_rank:
                # A later stage takes the input that is set here; only the first one embeds the tokens. With sequence
                # parallelism it is this rank's part of the rows.
                if stage > 0:
                    config = self.chunks.config
                    rows = len(packed.positions) // (self.topology.tp_size if config.sequence_parallel else 1)
                    shape, device = (rows, 1, config.hidden_size), self.platform.device
                    hidden = torch.empty(shape, dtype=config.pipeline_dtype, device=device)
                    dist.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
                    self.ddp_chunks[chunk].module.set_input_tensor(hidden)
                hidden = self._forward(self.ddp_chunks[chunk], tokens[None], packed)
                if stage < stages - 1:
                    dist.send(hidden.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
        return hidden[0] if hidden is not None and self.topology.is_last_stage else None
