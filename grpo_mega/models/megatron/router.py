"""Megatron's router on packed tokens: balancing counts every token of every sequence exactly once, and no padding.

Padding rows belong to no sequence, and a row that several sequences share stands for a token of each. Counted that way,
the balancing bias and the auxiliary losses do not depend on the layout, nor on the split into micro-batches.

With routing replay (R3, Ma et al., 2025, arXiv:2510.11370) tokens go to the experts that the engine sent them to,
weighted by this router's own scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from grpo_mega.models.megatron.packed import PackedTokens


class PackedRouter(TopKRouter):
    """Top-k routing with an expert bias and a sequence-wise balance loss (DeepSeek-V3, section 2.1.2).

    Each rank adds its rows' part of a loss over the whole batch; `packed.loss_scale` undoes Megatron's averages.
    """

    packed: PackedTokens
    config: TransformerConfig
    unfused: TransformerConfig
    """The configuration without Transformer Engine's fused router, which does not support replay."""
    load: torch.Tensor
    """[experts] tokens of this rank's rows that each expert has got in training since `start_counting`."""

    def routing(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's choice of experts, fused where its configuration says so and nothing is replayed."""
        # Megatron decides by `self.config`, which is shared with the layer, so it is swapped for this one call.
        config = self.config
        self.config = config if self.packed.experts is None else self.unfused
        try:
            return super().routing(*args, **kwargs)
        finally:
            self.config = config

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: Any = None) -> None:
        """Adds up tokens per expert; `routing_map` is [rows of this rank, experts]."""
        # Sampling and scoring must not move the balance. A layer that is recomputed does not count twice either: its
        # first forward pass is without gradients.
        if not torch.is_grad_enabled():
            return
        # Padding has no copies, so it counts 0. Megatron's padding_mask fails with a balancing bias (docs/parity.md,
        # defect 5).
        tokens = self._local_copies() @ routing_map.float()
        self.load += tokens
        # Megatron moves the bias by these counts after a pass, and sets them to zero.
        if self.enable_expert_bias:
            self.local_tokens_per_expert += tokens

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: Any = None) -> torch.Tensor:
        """Attaches coefficient * mean of logsumexp(logits)^2 over the batch's tokens (ST-MoE, equation 5)."""
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not torch.is_grad_enabled():
            return logits
        loss = (self._local_copies() * logits.logsumexp(-1).square()).sum()
        return self._attach(logits, coefficient * loss / self.packed.batch_tokens)

    def _apply_seq_aux_loss(
        self, probs: torch.Tensor, scores_for_aux_loss: torch.Tensor, routing_map: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Attaches coefficient * mean over the batch's sequences of sum_i f_i P_i (DeepSeek-V3, equations 17 to 20)."""
        coefficient = self.get_aux_loss_coeff("seq_aux_loss")
        if coefficient == 0 or self.packed.sequences == 0:
            return probs
        # The same in every layer, so the first one computes it.
        if self.packed.routed is None:
            self.packed.routed = self._local_tokens()
        rows, sequence, lengths = self.packed.routed
        chosen = routing_map.new_zeros(self.packed.sequences, routing_map.shape[-1], dtype=torch.float32)
        chosen.index_add_(0, sequence, routing_map[rows].float())
        # Without sequence parallelism all tensor parallel ranks have the same rows: a sum over them would count a token
        # once per rank.
        dist.all_reduce(chosen, group=self.tp_cp_group if self.config.sequence_parallel else self.cp_group)
        # f_i / T of every sequence: the factor of a row's score of expert i in sum_i f_i P_i.
        counts = chosen * routing_map.shape[-1] / (self.topk * lengths.square())
        counts = torch.zeros_like(scores_for_aux_loss).index_add_(0, rows, counts[sequence])
        return self._attach(probs, coefficient * (counts * scores_for_aux_loss).sum() / self.packed.batch_sequences)

    def experts_of_engine(self) -> torch.Tensor | None:
        """[rows of this rank, top k] the engine's experts of each row, -1 where scores choose; None if all do."""
        # Layers are numbered from 1, and the engine's choices from the first layer with experts.
        layer = self.layer_number - 1 - self.config.moe_layer_freq.index(1)
        # An engine has no prediction modules, so their routers choose by score.
        if self.packed.experts is None or layer >= self.packed.experts.shape[1]:
            return None
        return self._local(self.packed.experts[:, layer].long())

    def _attach(self, activation: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return MoEAuxLossAutoScaler.apply(activation, loss * self.packed.loss_scale)

    def _local(self, rows: torch.Tensor) -> torch.Tensor:
        """This tensor parallel rank's part of values per row of this context parallel rank."""
        if not self.config.sequence_parallel:
            return rows
        return rows.chunk(self.tp_group.size())[self.tp_group.rank()]

    def _local_copies(self) -> torch.Tensor:
        """[rows of this rank] number of tokens that each row stands for."""
        return self._local(self.packed.copies)

    def _local_tokens(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Row and sequence of each token on this rank, [tokens] each, and the lengths of all sequences, [N, 1]."""
        packed = self.packed
        # Rows may be split twice, over context parallel ranks and, with sequence parallelism, over tensor parallel
        # ones.
        held = packed.shard.rows if packed.shard else torch.arange(packed.total, device=packed.rows.device)
        held = self._local(held)
        local = packed.rows.new_full((packed.total,), -1)
        local[held] = torch.arange(len(held), device=held.device)
        rows = local[packed.rows]
        lengths = torch.bincount(packed.sequence, minlength=packed.sequences)[:, None]
        return rows[rows >= 0], packed.sequence[rows >= 0], lengths


class _Replay:
    """Chooses the experts of each row for Megatron's router, instead of its own `RouterReplay`."""

    def __init__(self, router: PackedRouter) -> None:
        self._router = router

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: Any, group_topk: Any, own: Callable
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and numbers of the chosen experts, [rows, top k] each; `own` is Megatron's choice by scores."""
        best = own(scores, topk, num_groups, group_topk)
        replayed = self._router.experts_of_engine()
        if replayed is None:
            return best
        chosen = torch.where(replayed < 0, best[1], replayed)
        return scores.gather(1, chosen), chosen


def start_counting(model: torch.nn.Module) -> None:
    """Sets every router's `load` to zeros."""
    for router in _routers(model):
        router.load = torch.zeros(router.config.num_moe_experts, device=router.weight.device)


def expert_loads(model: torch.nn.Module) -> dict[int, list[float]]:
    """Layer number -> tokens that each expert got since `start_counting`, summed over all ranks; all must call it.

    Numbers after the last layer are multi-token prediction modules.
    """
    loads, routers = {}, list(_routers(model))
    if routers:
        counted = torch.stack([router.load for router in routers])
        dist.all_reduce(counted, group=routers[0].tp_dp_cp_group)
        loads = dict(zip((router.layer_number for router in routers), counted.tolist(), strict=True))
    stages: list = [None] * parallel_state.get_pipeline_model_parallel_world_size()
    dist.all_gather_object(stages, loads, group=parallel_state.get_pipeline_model_parallel_group())
    return dict(sorted(item for stage in stages for item in stage.items()))


def _routers(model: torch.nn.Module) -> Iterator[PackedRouter]:
    return (module for module in model.modules() if isinstance(module, PackedRouter))


def use_packed_router(model: torch.nn.Module) -> None:
    """Changes the class of every router to PackedRouter, and sets its `packed` before each forward pass."""
    modules: Iterable[Any] = model.modules()
    for module in modules:
        router = getattr(getattr(module, "mlp", None), "router", None)
        if isinstance(module, TransformerLayer) and router is not None:
            if type(router) is not TopKRouter:
                raise TypeError(
                    f"the router of layer {module.layer_number} is {type(router)}, not Megatron's TopKRouter"
                )
            # Its weight and bias keep their marks and checkpoint keys.
            router.__class__ = PackedRouter
            # Megatron calls this in place of its own top-k.
            router.router_replay = _Replay(router)
            router.unfused = copy(router.config)
            router.unfused.moe_router_fusion = False
            module.register_forward_pre_hook(_set_packed, with_kwargs=True)
    start_counting(model)


def _set_packed(layer: Any, _: Any, arguments: dict[str, Any]) -> None:
    layer.mlp.router.packed = arguments["packed_seq_params"]
