"""What a rehearsal replaces because a GPU that computes nothing, or ranks that are not there, cannot give it.

Everything else is what a job runs: torch's CUDA build and its allocator, Transformer Engine, Megatron, this project.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from grpo_mega.forecast.rehearsal.holders import holders
from grpo_mega.forecast.rehearsal.spec import RankSpec
from grpo_mega.models import model as trained_model
from grpo_mega.models.chunks import ModelChunks
from grpo_mega.rollout.sglang.arguments import own_experts
from grpo_mega.types import Batch
from grpo_mega.weights import stream


@dataclass(frozen=True)
class StandIn:
    """One thing that is replaced.

    Attributes:
        name: What it is called in reports.
        reason: Why there is nothing real.
        apply: Replaces it.
    """

    name: str
    reason: str
    apply: Callable[[RankSpec], None]


def _balanced_experts(spec: RankSpec) -> None:
    """Every rank's experts get `imbalance` times the average, all of them equally many tokens."""
    original = MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize

    def balanced(self: Any, point: str, tokens_per_expert: torch.Tensor | None = None) -> Any:
        found = original(self, point, tokens_per_expert)  # with the copies and waits that it makes
        routed = self.hidden_shape.numel() // self.hidden_shape[-1] * self.config.moe_router_topk
        arriving = int(routed * spec.imbalance)
        counts = np.array([arriving])
        if self.input_splits is not None:
            counts = _parts(arriving, self.ep_size)
            self.input_splits, self.output_splits = _parts(routed, self.ep_size), counts
            self.output_splits_tp = np.array([arriving] * self.tp_size)
        of_experts = [_parts(int(n), self.num_local_experts) for _ in range(self.tp_size) for n in counts]
        return None if found is None else torch.from_numpy(np.stack(of_experts)).sum(0)

    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = balanced


def _parts(total: int, parts: int) -> np.ndarray:
    """[parts] integers as equal as can be, whose sum is `total`."""
    return total // parts + (np.arange(parts) < total % parts)


def _finite(spec: RankSpec) -> None:
    def of_losses(losses: torch.Tensor, index: torch.Tensor, batch: Batch) -> None:
        bool((~torch.isfinite(losses)).any())

    check = trained_model.refuse_non_finite_gradients

    def of_gradients(gpt: ModelChunks, model: list[Any]) -> None:
        with suppress(FloatingPointError):
            check(gpt, model)

    trained_model.refuse_non_finite_losses = of_losses
    trained_model.refuse_non_finite_gradients = of_gradients


def _shards_of_others(spec: RankSpec) -> None:
    config, sharing = spec.config, stream._Sharing.__init__
    sglang, of_model = config.rollout.sglang, config.model.moe.experts
    of_ranks = [own_experts(sglang, of_model, rank % sglang.tp) for rank in range(spec.world_size)]

    def asked(byte_budget: int, experts_of: range | None, experts: int) -> list[range | None]:
        return of_ranks if experts_of else [None] * spec.world_size

    def with_others(self: Any, *arguments: Any, **named: Any) -> None:
        sharing(self, *arguments, **named)
        self._holder = holders(self.entries, self._parts.held, self._me, self._group.size(), config.layout.pp)

    stream._asked = asked
    stream._Sharing.__init__ = with_others  # type: ignore[method-assign]


def _tensors_as_text(spec: RankSpec) -> None:
    def without_values(self: torch.Tensor, *, tensor_contents: str | None = None) -> str:
        return f"tensor({list(self.shape)}, device={self.device}, dtype={self.dtype})"

    torch.Tensor.__repr__ = without_values  # type: ignore[method-assign, assignment]


STAND_INS = (
    StandIn(
        "balanced experts",
        "which experts tokens go to is computed by kernels: all get equally many, times --imbalance",
        _balanced_experts,
    ),
    StandIn(
        "shards of others",
        "nobody else says what it holds, or which experts its engine has: shards are as large as this rank's own",
        _shards_of_others,
    ),
    StandIn(
        "finite numbers",
        "no kernel writes, so memory holds zeros or leftovers: checks are made, and what they find is ignored",
        _finite,
    ),
    StandIn(
        "tensors as text",
        "to print a tensor, torch selects its finite numbers, and how many these are is computed by a kernel: its "
        "place holds leftovers, of up to more than the machine has memory for",
        _tensors_as_text,
    ),
)


def apply(spec: RankSpec) -> None:
    """Puts all of them in place, after Megatron was imported and before a model is built."""
    for stand_in in STAND_INS:
        stand_in.apply(spec)
