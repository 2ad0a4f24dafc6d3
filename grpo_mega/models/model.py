"""A Megatron body with a head, under any layout: weights, optimizer, and passes over packed batches.

What a model is for is said by its head: `Policy` gives log-probs of tokens, `ScalarModel` a number for each. The batch
given to every method is the same global batch on every rank; each rank computes its share and the results are whole
again on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from grpo_mega.config.schema import LayoutConfig, ModelConfig, OptimizerConfig
from grpo_mega.models.body import DTYPES, build_model
from grpo_mega.models.finite import refuse_non_finite_gradients, refuse_non_finite_losses
from grpo_mega.models.megatron.changes import TO_PARALLEL_CHUNK, apply_changes
from grpo_mega.models.megatron.packed import PackedTokens
from grpo_mega.models.megatron.router import expert_loads, start_counting
from grpo_mega.models.microbatch import MicroBatch, MicroBatches
from grpo_mega.models.optimizer import build_optimizer, set_learning_rate
from grpo_mega.models.replicas import gather_gradients, gather_parameters
from grpo_mega.models.shards import count_parameters, gather_whole, initialize
from grpo_mega.models.topology import Topology
from grpo_mega.platform import Platform


@dataclass
class MicroLoss:
    """The loss of one micro-batch and what its head gave.

    Attributes:
        total: The scalar to minimise, the micro-batch's part of a sum over the batch; it has gradients.
        losses: [n] the scored tokens' terms of it.
        outputs: [n] what the head gives for them.
        means: What is logged, "loss" among it; see `losses.mean_over`.
    """

    total: torch.Tensor
    losses: torch.Tensor
    outputs: torch.Tensor
    means: dict[str, torch.Tensor]


@dataclass
class Pass:
    """What the forward and backward pass of one global batch found; the gradients lie in Megatron's buffers.

    Attributes:
        outputs: [T] what the head gave for the scored tokens, 0 elsewhere.
        expert_loads: Layer number -> tokens that each of its experts got; {} for a dense model.
        metrics: "loss" is sum(weight * token loss); the others are means over the tokens that count.
            "expert_imbalance" is how many times the average the busiest expert of any layer got.
    """

    outputs: torch.Tensor
    expert_loads: dict[int, list[float]]
    metrics: dict[str, float]


class Model:
    """This rank's part of a Megatron body with a head, with its optimizer.

    Attributes:
        chunks: Its pieces of the model as Megatron builds them.
        ddp_chunks: The same pieces, each in Megatron's data parallelism: what computes, and what has gradients.
        optimizer: None until `use_optimizer`.
        role: What it is in training, for messages and lists: "policy", "critic".
    """

    def __init__(
        self,
        role: str,
        model: ModelConfig,
        layout: LayoutConfig,
        vocab_size: int,
        topology: Topology,
        platform: Platform,
        distributed_optimizer: bool,
        overlap: bool,
        bucket_size: int | None,
        scalar: bool,
    ) -> None:
        """`bucket_size`: about how many parameters travel together when communication overlaps; None for Megatron's
        choice, 40 million or more. With `scalar` the head gives one number for each token; otherwise it is that of a
        language model.
        """
        self.role = role
        self.topology = topology
        self.platform = platform
        self.context = model.context
        self.vocab_size = vocab_size
        self._config = model
        self._budget = layout.micro_batch_tokens
        self.chunks = build_model(model, layout, vocab_size, platform, scalar)
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
        """The gradient of every parameter of the whole model, as the last pass left it; every rank must call it."""
        gather_gradients(self.ddp_chunks)
        return gather_whole(self.chunks, lambda p: getattr(p, "main_grad", None))

    def use_optimizer(self, config: OptimizerConfig) -> None:
        """Starts a fresh optimizer; the one before, with its moments, is dropped."""
        self.optimizer = self.chunks.config.grad_scale_func = None  # let go before the new one takes its memory
        dtype = DTYPES[self._config.dtype]
        self.optimizer = build_optimizer(config, self.ddp_chunks, dtype, self._distributed_optimizer)
        self.chunks.config.grad_scale_func = self.optimizer.scale_loss

    def _scored(self, micros: MicroBatches, score: Callable[[MicroBatch, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """[T] what `score(micro, output)` gives for each micro-batch's scored tokens, 0 elsewhere, without gradient."""
        result = torch.zeros(len(micros.batch.tokens), device=self.platform.device)

        def of_micro_batch(micro: MicroBatch, output: torch.Tensor, non_loss_data: bool) -> None:
            result[micro.index] = score(micro, output)

        with torch.no_grad():
            self._forward_backward(micros, of_micro_batch, forward_only=True)
        return self.topology.sum_over_samples(result).cpu()

    def _backward(self, micros: MicroBatches, loss: Callable[[MicroBatch, torch.Tensor], MicroLoss]) -> Pass:
        """Forward and backward pass of `loss(micro, output)` over the whole batch; gradients of passes before are lost.

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
        outputs = torch.zeros(len(micros.batch.tokens), device=self.platform.device)
        sums: dict[str, torch.Tensor] = {}

        def of_micro_batch(micro: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, dict]:
            found = loss(micro, output)
            refuse_non_finite_losses(found.losses, micro.index, micros.batch)
            outputs[micro.index] = found.outputs.detach()
            for name, mean in found.means.items():
                sums[name] = sums.get(name, 0.0) + mean
            return found.total * micro.packed.loss_scale, {}

        self._forward_backward(micros, of_micro_batch, forward_only=False)
        refuse_non_finite_gradients(self.chunks, self.ddp_chunks)
        self.topology.sum_over_samples(outputs)
        sums_and_counts = self.topology.sum_by_name(sums)
        metrics = {name: total / max(tokens, 1.0) for name, (total, tokens) in sums_and_counts.items()}
        loads = expert_loads(self.chunks) if self._config.moe.experts else {}
        if loads:
            metrics["expert_imbalance"] = max(_imbalance(load) for load in loads.values())
        return Pass(outputs.cpu(), loads, metrics)

    def _step(self, lr: float) -> dict[str, float]:
        """One optimizer step along the gradients that are there: "grad_norm" (before clipping) and "lr"."""
        assert self.optimizer is not None, "call use_optimizer before update"
        set_learning_rate(self.optimizer, lr)
        _, grad_norm, _ = self.optimizer.step()
        return {"grad_norm": float(grad_norm), "lr": lr}

    def _forward(self, chunk: torch.nn.Module, tokens: torch.Tensor, packed: PackedTokens) -> torch.Tensor:
        return chunk(tokens, packed.positions[None], None, packed_seq_params=packed)

    def _forward_backward(self, micros: MicroBatches, on_last_stage: Callable, forward_only: bool) -> None:
        """Runs Megatron's pipeline schedule; `on_last_stage(micro, output, ...)` gets what comes out."""

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
