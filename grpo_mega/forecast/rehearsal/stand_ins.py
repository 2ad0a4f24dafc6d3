"""What a rehearsal replaces because a GPU that computes nothing, or absent ranks, cannot provide it.

Everything else runs as in a job: torch's CUDA build and its allocator, Transformer Engine, Megatron, this project.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_mega.forecast.rehearsal.spec import RankSpec
from grpo_mega.models import model as trained_model
from grpo_mega.models.chunks import ModelChunks
from grpo_mega.models.shards import Box
from grpo_mega.rollout.sglang.arguments import own_experts
from grpo_mega.types import Batch
from grpo_mega.weights import stream
from grpo_mega.weights.names import NamedTensor

SMALL = 1 << 20
"""Largest tensor on the host, in bytes, that is written."""
NORESERVE = 0x4000
"""Linux's MAP_NORESERVE: a process may map more than the machine has."""
aten = torch.ops.aten


@dataclass(frozen=True)
class StandIn:
    """A replacement for something that a rehearsal lacks.

    Attributes:
        name: Its name in reports.
        reason: Why the real thing is not available.
        apply: Replaces it.
    """

    name: str
    reason: str
    apply: Callable[[RankSpec], None]


def _balanced_experts(spec: RankSpec) -> None:
    """This rank's experts get `imbalance` times the average, in equal parts."""
    original = MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize

    def balanced(self: Any, point: str, tokens_per_expert: torch.Tensor | None = None) -> Any:
        # Called for its copies and waits, which are measured. The numbers that it returns are leftovers in memory.
        found = original(self, point, tokens_per_expert)
        routed = self.hidden_shape.numel() // self.hidden_shape[-1] * self.config.moe_router_topk
        arriving = int(routed * spec.imbalance)
        # Without expert parallelism Megatron leaves the splits None, and all tokens stay on this rank.
        counts = np.array([arriving])
        if self.input_splits is not None:
            counts = _parts(arriving, self.ep_size)
            self.input_splits, self.output_splits = _parts(routed, self.ep_size), counts
            self.output_splits_tp = np.array([arriving] * self.tp_size)
        of_experts = [_parts(int(n), self.num_local_experts) for _ in range(self.tp_size) for n in counts]
        return None if found is None else torch.from_numpy(np.stack(of_experts)).sum(0)

    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = balanced


def _parts(total: int, parts: int) -> np.ndarray:
    """[parts] integers, as equal as possible, whose sum is `total`."""
    return total // parts + (np.arange(parts) < total % parts)


def _finite(spec: RankSpec) -> None:
    def of_losses(losses: torch.Tensor, index: torch.Tensor, batch: Batch) -> None:
        # The same operations and the same wait as in the real check, whose result means nothing here.
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
    # An engine takes `sglang.tp` consecutive ranks, so a rank's place in its engine follows from its number.
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
        "kernels compute which experts tokens go to: all get equally many, times --imbalance",
        _balanced_experts,
    ),
    StandIn(
        "shards of others",
        "absent ranks cannot say what they hold, or which experts their engines have: shards have this rank's sizes",
        _shards_of_others,
    ),
    StandIn(
        "finite numbers",
        "no kernel writes, so memory holds zeros or leftovers: checks run, and their results are ignored",
        _finite,
    ),
    StandIn(
        "tensors as text",
        "to print a tensor, torch selects its finite numbers, whose count a kernel computes: its place holds "
        "leftovers, which may ask for more memory than the machine has",
        _tensors_as_text,
    ),
)


def apply(spec: RankSpec) -> None:
    """Applies all stand-ins, after Megatron was imported and before a model is built."""
    for stand_in in STAND_INS:
        stand_in.apply(spec)


@dataclass(frozen=True)
class _Cut:
    """How tensors of one kind are cut: successive shards belong to `ranks` ranks in turn.

    Attributes:
        shape: Shape of a shard.
        ranks: Number of ranks that share a tensor.
        index: Which of them this rank is.
    """

    shape: tuple[int, ...]
    ranks: int
    index: int


def holders(
    wanted: Iterable[NamedTensor], held: Mapping[str, Iterable[Box]], me: int, group: int, stages: int
) -> dict[str, dict[Box, int]]:
    """{key of a tensor: {shard: rank of the group that sends it}}, guessed from what this rank holds.

    A tensor of which this rank holds a part is shared with the ranks next to it. Other tensors are one stage further,
    or belong to another rank with experts, and are cut like this rank's tensors of their kind, or whole without any.

    Args:
        wanted: All tensors.
        held: Shards that this rank holds.
        me: This rank's number in the group.
        group: Number of ranks in the group.
        stages: Number of pipeline stages among them.
    """
    wholes = {entry.key: whole(entry) for entry in wanted}
    own = {key: sorted(held[key]) for key in wholes if key in held}
    # Cuts are taken from this rank's tensors, then applied to all tensors of the same kind.
    cuts = {}
    for key, boxes in own.items():
        part = tuple(last - first for first, last in boxes[0])
        tiles = [*_tiles(wholes[key], part)]
        ranks = len(tiles) // len(boxes)
        cuts[_kind(key)] = _Cut(part, ranks, tiles.index(boxes[0]) % ranks)
    senders = {}
    for key, shape in wholes.items():
        cut = cuts.get(_kind(key)) or _Cut(shape, 1, 0)
        # A tensor of another size that this cut does not divide counts as whole.
        if any(size % part for size, part in zip(shape, cut.shape, strict=True)):
            cut = _Cut(shape, 1, 0)
        further = 0 if key in own else group // stages if stages > 1 else cut.ranks
        first = me - cut.index + further
        senders[key] = {box: (first + i % cut.ranks) % group for i, box in enumerate(_tiles(shape, cut.shape))}
    return senders


def whole(entry: NamedTensor) -> tuple[int, ...]:
    """Shape of the Megatron tensor that holds a Hugging Face tensor."""
    others = entry.shape[1:2] if entry.place else entry.shape[1:]
    selected = entry.numel // math.prod(others)
    return (selected // (entry.rows.stop - entry.rows.start) * entry.rows.period, *others)


def _tiles(shape: Sequence[int], part: Sequence[int]) -> Iterator[Box]:
    """Boxes of this size that together make up a tensor, row by row."""
    axes = [range(0, size, step) for size, step in zip(shape, part, strict=True)]
    for corner in product(*axes):
        yield tuple((at, at + size) for at, size in zip(corner, part, strict=True))


def _kind(key: str) -> str:
    """A key without its numbers of layers and experts, which tensors of the same kind share."""
    return re.sub(r"\.\d+\b", "", key)


class UnwrittenHost(TorchDispatchMode):
    """Context in which large tensors on the host are address space only, as the GPU's are: nothing is written to them.

    A rehearsal thus needs less memory than the job.
    """

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs an operation, unless it only fills a large tensor on the host."""
        # Results have the right shape and dtype, which is all that is measured; pages that nobody touches take no
        # memory.
        named = kwargs or {}
        if function is aten.zeros.default and torch.device(named.get("device") or "cpu").type == "cpu":
            dtype = named.get("dtype") or torch.get_default_dtype()
            if math.prod(args[0]) * dtype.itemsize > SMALL:
                return _untouched(args[0], dtype)
        if function is aten.copy_.default and _is_large(args[0]) and args[1].device.type == "cpu":
            return args[0]
        if function is aten.cat.default and all(map(_is_large, args[0])):
            first, axis = args[0][0], args[1] if len(args) > 1 else 0
            shape = list(first.shape)
            shape[axis] = sum(part.shape[axis] for part in args[0])
            return _untouched(shape, first.dtype)
        if function is aten.clone.default and _is_large(args[0]):
            return _untouched(args[0].shape, args[0].dtype)
        return function(*args, **named)


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.nbytes > SMALL


def _untouched(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros in untouched pages."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    # The tensor keeps the mapping alive, and frees it with itself.
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)
