"""The policy: log-probs of packed batches and updates from a token loss, under any layout.

The batch given to every method is the same global batch on every rank; each rank computes its share and the results
are whole again on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from grpo_mega.config.schema import LayoutConfig, ModelConfig, OptimizerConfig
from grpo_mega.models.body import DTYPES, build_model
from grpo_mega.models.finite import refuse_non_finite_gradients
from grpo_mega.models.heads import LogProbHead
from grpo_mega.models.losses import Loss, mean_over, of_all
from grpo_mega.models.megatron.changes import TO_PARALLEL_CHUNK, apply_changes
from grpo_mega.models.megatron.packed import PackedTokens
from grpo_mega.models.megatron.router import expert_loads, start_counting
from grpo_mega.models.microbatch import MicroBatch, MicroBatches, micro_batches
from grpo_mega.models.optimizer import build_optimizer, set_learning_rate
from grpo_mega.models.replicas import gather_gradients, gather_parameters
from grpo_mega.models.shards import count_parameters, gather_whole, initialize
from grpo_mega.models.topology import Topology
from grpo_mega.platform import Platform
from grpo_mega.types import Batch


@dataclass
class Gradients:
    """What the forward and backward pass of one global batch found; the gradients lie in Megatron's buffers.

    Attributes:
        logprob: [T] log-probs of the scored tokens that have a weight, 0 elsewhere.
        expert_loads: Layer number -> tokens that each of its experts got; {} for a dense model.
        metrics: "loss" is sum(weight * token loss); the others are means over the tokens that count. "mtp_loss" is the
            cross entropy of the prediction modules, where there are any; "expert_imbalance" how many times the average
            the busiest expert of any layer got.
    """

    logprob: torch.Tensor
    expert_loads: dict[int, list[float]]
    metrics: dict[str, float]


class Policy:
    """This rank's part of a Megatron model, with its optimizer.

    Attributes:
        chunks: Its pieces of the model as Megatron builds them.
        ddp_chunks: The same pieces, each in Megatron's data parallelism: what computes, and what has gradients.
    """

    def __init__(
        self,
        model: ModelConfig,
        layout: LayoutConfig,
        vocab_size: int,
        topology: Topology,
        platform: Platform,
        distributed_optimizer: bool = False,
        overlap: bool = False,
        bucket_size: int | None = None,
    ) -> None:
        """`bucket_size`: about how many parameters travel together when communication overlaps; None for Megatron's
        choice, 40 million or more.
        """
        self.topology = topology
        self.platform = platform
        self.context = model.context
        self.vocab_size = vocab_size
        self._config = model
        self._budget = layout.micro_batch_tokens
        self.chunks = build_model(model, layout, vocab_size, platform)
        self.chunks.config.finalize_model_grads_func = finalize_model_grads
        self._distributed_optimizer = distributed_optimizer
        pieces = enumerate(self.chunks)
        # Later pieces' gradients are ready early and need no buckets of their own, as in Megatron's training loop.
        self.ddp_chunks = [self._data_parallel(piece, overlap, bucket_size, in_buckets=i == 0) for i, piece in pieces]
        if overlap:  # gradients add up over micro-batches and are reduced in the last one's backward pass
            no_sync = [chunk.no_sync for chunk in self.ddp_chunks]
            self.chunks.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        torch.cuda.empty_cache()  # weights have moved to Megatron's buffers; where they were before is not needed again
        self.optimizer: MegatronOptimizer | None = None

    @property
    def head(self) -> LogProbHead:
        """The output layer; only the last pipeline stage has one."""
        return self.chunks.last.output_layer

    @property
    def architecture(self) -> ModelConfig:
        """What the model is built from."""
        return self._config

    def parameters(self) -> int:
        """Parameters of the whole model; every rank must call it."""
        return count_parameters(self.chunks)

    def initialize(self, seed: int) -> None:
        """Random weights, the same in every layout."""
        initialize(self.chunks, seed, self._config.init_std, self._config.layers)

    def gather_parameters(self) -> None:
        """Makes the parameters whole on every replica; every rank must call it.

        With a distributed optimizer and overlap, an update leaves that to the next forward pass. What reads or replaces
        parameters outside of one calls this first.
        """
        gather_parameters(self.ddp_chunks)

    def whole_weights(self) -> dict[str, torch.Tensor]:
        """Every parameter and buffer of the whole model, see `gather_whole`; every rank must call it."""
        self.gather_parameters()
        return gather_whole(self.chunks)

    def whole_gradients(self) -> dict[str, torch.Tensor]:
        """The gradient of every parameter of the whole model, as `gradients` left it; every rank must call it."""
        gather_gradients(self.ddp_chunks)
        return gather_whole(self.chunks, lambda p: getattr(p, "main_grad", None))

    def use_optimizer(self, config: OptimizerConfig) -> None:
        """Starts a fresh optimizer; the one before, with its moments, is dropped."""
        self.optimizer = self.chunks.config.grad_scale_func = None  # let go before the new one takes its memory
        dtype = DTYPES[self._config.dtype]
        self.optimizer = build_optimizer(config, self.ddp_chunks, dtype, self._distributed_optimizer)
        self.chunks.config.grad_scale_func = self.optimizer.scale_loss

    def logprobs(self, batch: Batch, temperature: float) -> torch.Tensor:
        """[T] log-prob of every masked-in token, 0 elsewhere, whole on every rank. No gradient."""
        result = torch.zeros(len(batch.tokens), device=self.platform.device)

        def score(micro: MicroBatch, hidden: torch.Tensor, non_loss_data: bool) -> None:
            result[micro.index], _ = self.head.logprob(hidden[0, micro.rows], micro.scored.tokens, temperature)

        with torch.no_grad():
            self._forward_backward(self._micro_batches(batch), score, forward_only=True)
        return self.topology.sum_over_samples(result).cpu()

    def gradients(self, batch: Batch, loss: Loss, temperature: float = 1.0) -> Gradients:
        """Forward and backward of the loss over the whole batch.

        Raises:
            FloatingPointError: The loss of a scored token is not finite; names the sequence and the token. Or a
                gradient is not; names the parameter.
        """
        for chunk in self.ddp_chunks:
            chunk.zero_grad_buffer()
        if self.optimizer is not None:
            # An update leaves p.grad behind, an alias of the buffer: the next gradient would count twice.
            self.optimizer.zero_grad()
        start_counting(self.chunks)
        micros = self._micro_batches(batch, self._config.mtp_layers)
        trained = max(int(batch.mask.sum()), 1)
        logprob = torch.zeros(len(batch.tokens), device=self.platform.device)
        sums: dict[str, torch.Tensor] = {}

        def of_micro_batch(micro: MicroBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, dict]:
            # Megatron averages over micro-batches and adds up over context parallel ranks.
            grad_scale = micro.packed.loss_scale * self.topology.cp_size / len(micros)
            found = self.head.loss(loss, hidden[0, micro.rows], micro.scored, temperature, grad_scale)
            _refuse_non_finite(found.losses, micro.index, batch)
            logprob[micro.index] = found.logprob
            total, means = found.total, found.means | {"loss": of_all(found.total.detach())}
            if micro.ahead:
                drafts = self._draft_loss(micro, hidden, temperature)
                total = total + self._config.mtp_loss_coef * drafts / trained
                means["mtp_loss"] = mean_over(drafts.detach(), torch.ones_like(micro.scored.tokens).sum())
            for name, mean in means.items():
                sums[name] = sums.get(name, 0.0) + mean
            return total * micro.packed.loss_scale, {}

        self._forward_backward(micros, of_micro_batch, forward_only=False)
        refuse_non_finite_gradients(self.chunks, self.ddp_chunks)
        self.topology.sum_over_samples(logprob)
        sums_and_counts = self.topology.sum_by_name(sums)
        metrics = {name: total / max(tokens, 1.0) for name, (total, tokens) in sums_and_counts.items()}
        loads = expert_loads(self.chunks) if self._config.moe.experts else {}
        if loads:
            metrics["expert_imbalance"] = max(_imbalance(load) for load in loads.values())
        return Gradients(logprob.cpu(), loads, metrics)

    def update(self, batch: Batch, loss: Loss, lr: float, temperature: float = 1.0) -> Gradients:
        """One optimizer update; "grad_norm" (before clipping) and "lr" join the metrics."""
        assert self.optimizer is not None, "call use_optimizer before update"
        found = self.gradients(batch, loss, temperature)
        set_learning_rate(self.optimizer, lr)
        _, grad_norm, _ = self.optimizer.step()
        found.metrics |= {"grad_norm": float(grad_norm), "lr": lr}
        return found

    def hidden_states(self, tokens: torch.Tensor, packed: PackedTokens) -> torch.Tensor | None:
        """[T', H] last hidden states of packed tokens [T'], on the last pipeline stage; None on the others.

        One batch walks through the stages alone, without Megatron's schedule: that one asks for several at once when
        stages are interleaved, and a decoding step has no others to wait for.
        """
        # Every context parallel rank generates sequences of its own; Megatron counts on rows of all of them.
        packed = packed.counted_by(self.topology.cp_size)
        stages, hidden = self.topology.pp_size * len(self.ddp_chunks), None
        for stage in range(stages):
            chunk, rank = divmod(stage, self.topology.pp_size)
            if rank == self.topology.pp_rank:
                if stage > 0:
                    self.ddp_chunks[chunk].module.set_input_tensor(self._received(packed))
                hidden = self._forward(self.ddp_chunks[chunk], tokens[None], packed)
                if stage < stages - 1:
                    dist.send(hidden.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
        return hidden[0] if hidden is not None and self.topology.is_last_stage else None

    def _received(self, packed: PackedTokens) -> torch.Tensor:
        """What the stage before sends: [T', 1, H], with sequence parallelism this rank's part of the rows."""
        config = self.chunks.config
        rows = len(packed.positions) // (self.topology.tp_size if config.sequence_parallel else 1)
        shape = (rows, 1, config.hidden_size)
        hidden = torch.empty(shape, dtype=config.pipeline_dtype, device=self.platform.device)
        dist.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
        return hidden

    def _forward(self, chunk: torch.nn.Module, tokens: torch.Tensor, packed: PackedTokens) -> torch.Tensor:
        return chunk(tokens, packed.positions[None], None, packed_seq_params=packed)

    def _draft_loss(self, micro: MicroBatch, hidden: torch.Tensor, temperature: float) -> torch.Tensor:
        """Sum over the micro-batch's scored tokens of -log-prob under the prediction modules, mean over depths."""
        losses = [
            self.head.draft_loss(hidden[depth, ahead.rows], ahead.tokens, temperature)
            for depth, ahead in enumerate(micro.ahead, start=1)
        ]
        return torch.stack(losses).mean()

    def _micro_batches(self, batch: Batch, depths: int = 0) -> MicroBatches:
        return micro_batches(batch, self.topology, self._budget, self.platform.device, depths)

    def _forward_backward(self, micros: MicroBatches, on_last_stage: Callable, forward_only: bool) -> None:
        """Runs Megatron's pipeline schedule; `on_last_stage(micro, hidden [1, T', H], ...)` gets what comes out."""

        def forward(iterator: Any, chunk: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
            micro = next(iterator)
            return self._forward(chunk, micro.tokens, micro.packed), partial(on_last_stage, micro)

        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=micros.readers(len(self.ddp_chunks)),
            model=self.ddp_chunks,
            num_microbatches=len(micros),
            seq_length=self.context,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _data_parallel(
        self, chunk: torch.nn.Module, overlap: bool, bucket_size: int | None, in_buckets: bool
    ) -> DistributedDataParallel:
        """A piece of the model with Megatron's gradient buffers."""
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            check_for_nan_in_grad=False,  # see finite.py
            use_distributed_optimizer=self._distributed_optimizer,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap and self._distributed_optimizer,
            bucket_size=bucket_size,
        )
        wrapped = Float16Module(self.chunks.config, chunk) if self._config.dtype == "bf16" else chunk
        parallel = DistributedDataParallel(self.chunks.config, config, wrapped, disable_bucketing=not in_buckets)
        apply_changes(TO_PARALLEL_CHUNK, parallel)
        return parallel


def _imbalance(load: list[float]) -> float:
    """The busiest expert's tokens over the average expert's, 1 when all are alike."""
    return max(load) * len(load) / max(sum(load), 1.0)


def _refuse_non_finite(losses: torch.Tensor, index: torch.Tensor, batch: Batch) -> None:
    """`index` says which tokens of the batch these are. A GPU is waited for, once per micro-batch."""
    bad = ~torch.isfinite(losses)
    if bad.any():
        place = int(index[bad][0])
        sequence = int(torch.searchsorted(batch.cu_seqlens, place, right=True)) - 1
        raise FloatingPointError(
            f"the loss of token {place - int(batch.cu_seqlens[sequence])} of sequence {sequence} of the batch is "
            f"{losses[bad][0].item()}; look at its log-probs and advantage, and lower the learning rate if the "
            "policy diverged"
        )
