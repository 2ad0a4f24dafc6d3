"""A Megatron body with a head, under any layout: weights, optimizer, and passes over packed batches.

The head decides what a model computes: `Policy` gives log-probs of tokens, `ScalarModel` a number for each. Methods
take the batch of the rank's data parallel replica (`microbatch.share` selects it from a global one); their results are
for this batch, and complete on all ranks of the replica. Losses and gradients are over all replicas.
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

from grpo_mega.config.schema import LayoutConfig, LoRAConfig, ModelConfig, OptimizerConfig
from grpo_mega.models.adapters import initialize_adapters, is_adapter
from grpo_mega.models.body import DTYPES, build_model
from grpo_mega.models.finite import refuse_non_finite_gradients, refuse_non_finite_losses
from grpo_mega.models.flops import learning_flops
from grpo_mega.models.megatron.between_stages import SpanTimers, between_stages
from grpo_mega.models.megatron.changes import TO_PARALLEL_CHUNK, apply_changes
from grpo_mega.models.megatron.dispatch import check_dispatch
from grpo_mega.models.megatron.own_shards import gather_gradients, gather_parameters
from grpo_mega.models.megatron.packed import PackedTokens
from grpo_mega.models.megatron.router import expert_loads, start_counting
from grpo_mega.models.megatron.te_kernels import check_eight_bits
from grpo_mega.models.megatron.varlen import choose
from grpo_mega.models.microbatch import MicroBatch, MicroBatches, gathered, micro_batches, share
from grpo_mega.models.optimizer import build_optimizer, set_learning_rate
from grpo_mega.models.parts import freeze, frozen_parts, part_of
from grpo_mega.models.shards import count_parameters, gather_whole, initialize
from grpo_mega.models.topology import Topology
from grpo_mega.platform import Platform, trace
from grpo_mega.types import Batch

NOT_SHARDED = OptimizerConfig()
"""Each replica has the whole state of the optimizer; every weight is trained."""


@dataclass
class MicroLoss:
    """The loss and the outputs of one micro-batch.

    Attributes:
        total: The scalar to minimise, the micro-batch's part of a sum over the batch; it has gradients.
        losses: [n] the scored tokens' terms of `total`.
        outputs: [n] the head's outputs for the scored tokens.
        means: Metrics to log, "loss" among them; see `objective.logged_mean`.
        entropies: [n] entropies of the tokens' distributions; None of a model without such.
    """

    total: torch.Tensor
    losses: torch.Tensor
    outputs: torch.Tensor
    means: dict[str, torch.Tensor]
    entropies: torch.Tensor | None = None


@dataclass
class Pass:
    """The result of a forward and backward pass over one global batch; the gradients are in Megatron's buffers.

    Attributes:
        outputs: [T] the head's outputs (log-probs, values) for the scored tokens of this replica's batch, 0 elsewhere.
        expert_loads: Layer number -> tokens that each of its experts got; {} for a dense model.
        metrics: "loss" is sum(weight * token loss); the others are means over the tokens that count. "mtp_loss" is the
            cross entropy of the prediction modules, if there are any; "expert_imbalance" the tokens of the busiest
            expert of any layer over those of the layer's average expert.
        tokens: Number of scored tokens of all replicas.
        entropies: [T] entropies at the scored tokens, 0 elsewhere, and everywhere for a model without such.
    """

    outputs: torch.Tensor
    expert_loads: dict[int, list[float]]
    metrics: dict[str, float]
    tokens: int
    entropies: torch.Tensor


class Model:
    """This rank's part of a Megatron body with a head, with its optimizer.

    Attributes:
        chunks: This rank's pieces of the model as Megatron builds them.
        ddp_chunks: The pieces wrapped in Megatron's DistributedDataParallel, which computes and holds the gradients.
        optimizer: None until `use_optimizer`.
        role: The model's role in training, for messages and lists: "policy", "critic".
        updates: Optimizer steps that the weights have seen. For the policy, whose count a run restores, also the
            version that engines are compared with: after other replacements of its weights they must be told
            (`EngineAccess.outdate`).
        trained: Whether the model has gradients.
        lora: Settings of the adapters, the only weights that are then trained; None without adapters.
        attention: The implementation of attention in use: a value of `layout.attention` other than auto.
        flops: Floating-point operations of training since the counter was last reset (`learning_flops`): this rank's
            share, an equal part of its replica's.
        scalar: Whether the head gives one number for each token; otherwise it is that of a language model.
    """

    role: str
    scalar = False

    def __init__(
        self,
        model: ModelConfig,
        layout: LayoutConfig,
        vocab_size: int,
        topology: Topology,
        platform: Platform,
        optimizer: OptimizerConfig | None = NOT_SHARDED,
        lora: LoRAConfig | None = None,
        bucket_size: int | None = None,
    ) -> None:
        """Builds this rank's part, with weights that are not yet initialised.

        Args:
            model: The architecture.
            layout: How the model is split over ranks.
            vocab_size: The tokenizer's.
            topology: This process's ranks.
            platform: Device and backend.
            optimizer: Settings of training: `distributed`, `overlap` and `frozen` shape the gradient buffers that are
                made here; `use_optimizer` creates the optimizer. None for a model without gradients.
            lora: Trains adapters and no other weights, see `LoRAConfig`; None, or rank 0, for no adapters.
            bucket_size: About how many parameters are communicated together with `optimizer.overlap`; None for
                Megatron's choice, 40 million or more.
        """
        check_eight_bits(layout, platform)
        check_dispatch(layout, platform)
        self.updates = 0
        self.flops = 0.0
        self._outputs = 1 if self.scalar else vocab_size
        self.topology = topology
        self.platform = platform
        self.context = model.context
        self.vocab_size = vocab_size
        self._config = model
        self._budget = layout.micro_batch_tokens
        self.attention = choose(layout, model, platform.device)
        self.lora = lora if lora is not None and lora.rank else None
        self.chunks = build_model(model, layout, vocab_size, platform, self.scalar, self.lora)
        self.trained = optimizer is not None
        settings = optimizer or NOT_SHARDED
        kept = frozen_parts(settings.frozen, self.lora)
        # Before Megatron wraps the pieces: only parameters that require a gradient get room in its buffers.
        freeze(self.chunks, lambda name: not self.trained or part_of(name, model.tie_embeddings) in kept)
        self.chunks.config.finalize_model_grads_func = finalize_model_grads
        self.chunks.config.timers = SpanTimers()
        self._distributed = settings.distributed
        # The gradients of later pieces are ready early and need no buckets, as in Megatron's training loop.
        self.ddp_chunks = [
            self._data_parallel(piece, settings.overlap, bucket_size, in_buckets=i == 0)
            for i, piece in enumerate(self.chunks)
        ]
        # With overlap, gradients add up over micro-batches and are reduced only during the last backward pass.
        if settings.overlap:
            no_sync = [chunk.no_sync for chunk in self.ddp_chunks]
            self.chunks.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        # The weights have moved to Megatron's buffers; their first memory is not needed again.
        torch.cuda.empty_cache()
        self.optimizer: MegatronOptimizer | None = None

    @property
    def architecture(self) -> ModelConfig:
        """The configuration that the model is built from."""
        return self._config

    def parameters(self) -> int:
        """Number of parameters of the whole model, adapters not included; every rank must call it."""
        return count_parameters(self.chunks, lambda key: not is_adapter(key))

    def adapter_parameters(self) -> int:
        """Number of parameters of all adapters; every rank must call it."""
        return count_parameters(self.chunks, is_adapter)

    def initialize(self, seed: int) -> None:
        """Sets random weights, the same in every layout."""
        initialize(self.chunks, seed, self._config.init_std, self._config.layers)
        self.initialize_adapters(seed)

    def initialize_adapters(self, seed: int) -> None:
        """Initialises the adapters, the same in every layout; the model then computes the same as without them."""
        if self.lora is not None:
            initialize_adapters(self.chunks, seed)

    def gather_parameters(self) -> None:
        """Makes the parameters whole on every replica; every rank must call it.

        With a distributed optimizer and overlap, an update leaves that to the next forward pass. Code that reads or
        replaces parameters outside of a forward pass calls this first.
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

    def share(self, batch: Batch) -> Batch:
        """This replica's sequences of a global batch that every rank has; see `microbatch.share`."""
        return share(batch, self.topology, self._budget, self.attention == "padded")

    def gathered(self, vector: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[T] a vector of the replica's batch -> that of the global batch; see `microbatch.gathered`."""
        return gathered(vector, batch, self.topology)

    def use_optimizer(self, config: OptimizerConfig) -> None:
        """Creates a new optimizer; the previous one, with its moments, is dropped.

        Raises:
            RuntimeError: The model is not trained.
        """
        self._refuse_frozen()
        # The old state is freed before the new one allocates.
        self.optimizer = self.chunks.config.grad_scale_func = None
        dtype = DTYPES[self._config.dtype]
        tied = self._config.tie_embeddings
        self.optimizer = build_optimizer(config, self.ddp_chunks, dtype, self._distributed, tied)
        self.chunks.config.grad_scale_func = self.optimizer.scale_loss

    def _micro_batches(self, batch: Batch, depths: int = 0, own_state: bool = False) -> MicroBatches:
        """The replica's micro-batches of its batch; see `microbatch.micro_batches`."""
        device, padded = self.platform.device, self.attention == "padded"
        return micro_batches(batch, self.topology, self._budget, device, depths, own_state, padded)

    def _scored(self, micros: MicroBatches, score: Callable[[MicroBatch, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """[T] the results of `score(micro, output)` for the scored tokens, 0 elsewhere; without gradients."""
        # Rows of other context parallel ranks stay 0, as do all on earlier stages: the sum below completes them.
        result = torch.zeros(len(micros.batch.tokens), device=self.platform.device)

        def of_micro_batch(micro: MicroBatch, output: torch.Tensor, non_loss_data: bool) -> None:
            result[micro.scored.index] = score(micro, output)

        with torch.no_grad():
            self._forward_backward(micros, of_micro_batch, forward_only=True)
        with trace.span("reduce"):
            return self.topology.whole_in_replica(result).cpu()

    def _backward(self, micros: MicroBatches, loss: Callable[[MicroBatch, torch.Tensor], MicroLoss]) -> Pass:
        """Forward and backward pass of `loss(micro, output)` over all replicas' batches; replaces earlier gradients.

        Raises:
            FloatingPointError: The loss of a scored token is not finite; names the sequence and the token. Or a
                gradient is not; names the parameter.
        """
        self._refuse_frozen()
        # Megatron adds each micro-batch to its gradient buffers and never clears them itself.
        for chunk in self.ddp_chunks:
            chunk.zero_grad_buffer()
        if self.optimizer is not None:
            # After an update p.grad is an alias of the buffer: the next gradient would count twice.
            self.optimizer.zero_grad()
        start_counting(self.chunks)
        # A replica has world_size / dp_size ranks (tensor, pipeline and context parallel), which share its operations
        # equally.
        lengths, scored = micros.batch.lengths.tolist(), int(micros.batch.mask.sum())
        ranks = self.topology.world_size // self.topology.dp_size
        self.flops += learning_flops(self._config, self._outputs, lengths, scored, self.lora is not None) / ranks
        # One tensor for outputs and entropies, so that one reduction completes both.
        outputs = torch.zeros(2, len(micros.batch.tokens), device=self.platform.device)
        sums: dict[str, torch.Tensor] = {}

        def of_micro_batch(micro: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, dict]:
            result = loss(micro, output)
            refuse_non_finite_losses(result.losses, micro.scored.index, micros.batch)
            outputs[0, micro.scored.index] = result.outputs.detach()
            if result.entropies is not None:
                outputs[1, micro.scored.index] = result.entropies.detach()
            for name, mean in result.means.items():
                sums[name] = sums.get(name, 0.0) + mean
            # Undoes Megatron's averages over micro-batches and replicas: token weights are global already. Its mode
            # without averages, calculate_per_token_loss, scales the routers' losses wrongly (docs/parity.md, defect 2).
            return result.total * micro.packed.loss_scale, {}

        self._forward_backward(micros, of_micro_batch, forward_only=False)
        # A separate span, because ranks that are done wait here for those that are not.
        with trace.span("reduce"):
            # Before any result is used: every rank raises here together, with no weight changed.
            refuse_non_finite_gradients(self.chunks, self.ddp_chunks)
            self.topology.whole_in_replica(outputs)
            sums_and_counts = self.topology.sum_by_name(sums)
        metrics = {name: total / max(tokens, 1.0) for name, (total, tokens) in sums_and_counts.items()}
        loads = expert_loads(self.chunks) if self._config.moe.experts else {}
        if loads:
            # Tokens of a layer's busiest expert over those of its average one; 1 when all have equally many.
            metrics["expert_imbalance"] = max(max(load) * len(load) / max(sum(load), 1.0) for load in loads.values())
        whole, entropies = outputs.cpu()
        return Pass(whole, loads, metrics, micros.totals.scored, entropies)

    def apply(self, gradients: Pass, lr: float) -> Pass:
        """One optimizer step along these gradients; adds "grad_norm" (before clipping) and "lr" to their metrics."""
        assert self.optimizer is not None, "call use_optimizer before update"
        set_learning_rate(self.optimizer, lr)
        with trace.span("optimizer"):
            # The first result, whether a step was made, is always True: only the loss scaler of fp16 skips steps.
            _, grad_norm, _ = self.optimizer.step()
        self.updates += 1
        gradients.metrics |= {"grad_norm": float(grad_norm), "lr": lr}
        return gradients

    def _refuse_frozen(self) -> None:
        if not self.trained:
            raise RuntimeError(f"the {self.role} was built with optimizer=None: it has no gradients and no optimizer")

    def _forward(self, chunk: torch.nn.Module, tokens: torch.Tensor, packed: PackedTokens) -> torch.Tensor:
        return chunk(tokens, packed.positions[None], None, packed_seq_params=packed)

    def _forward_backward(self, micros: MicroBatches, on_last_stage: Callable, forward_only: bool) -> None:
        """Runs Megatron's pipeline schedule; the last stage calls `on_last_stage(micro, output, ...)`."""

        def forward(iterator: Any, chunk: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
            micro = next(iterator)
            # Dispatchers keep a micro-batch's exchange of tokens only if a backward pass may recompute it.
            micro.packed.learned = not forward_only
            return self._forward(chunk, micro.tokens, micro.packed), partial(on_last_stage, micro)

        config, between = self.chunks.config, {}
        if self.topology.pp_size > 1:
            # The hidden states of each micro-batch on this rank.
            ranks = self.topology.cp_size * (self.topology.tp_size if config.sequence_parallel else 1)
            shapes = [(micros.rows(sequences) // ranks, 1, config.hidden_size) for sequences in micros.plan]
            between = between_stages(config, shapes)
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=micros.readers(len(self.ddp_chunks)),
            model=self.ddp_chunks,
            num_microbatches=len(micros),
            # Megatron requires a length, but reads it only where all micro-batches are equally long.
            seq_length=self.context,
            micro_batch_size=1,
            forward_only=forward_only,
            # Then Megatron takes the results of the last stage for data, not for losses that it would average.
            collect_non_loss_data=forward_only,
            **between,
        )

    def _data_parallel(
        self, chunk: torch.nn.Module, overlap: bool, bucket_size: int | None, in_buckets: bool
    ) -> DistributedDataParallel:
        """A piece of the model with Megatron's gradient buffers."""
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            # `refuse_non_finite_gradients` checks instead; finite.py says why.
            check_for_nan_in_grad=False,
            use_distributed_optimizer=self._distributed,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap and self._distributed,
            bucket_size=bucket_size,
        )
        wrapped = Float16Module(self.chunks.config, chunk) if self._config.dtype == "bf16" else chunk
        parallel = DistributedDataParallel(self.chunks.config, config, wrapped, disable_bucketing=not in_buckets)
        apply_changes(TO_PARALLEL_CHUNK, parallel)
        return parallel
