"""This rank's shards of a policy's tensors, with adapters merged shard by shard: W + alpha / rank * B A."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch

from grpo_mega.config.schema import LoRAConfig, ModelConfig
from grpo_mega.models.adapters import A, B
from grpo_mega.models.body import head_channels
from grpo_mega.models.chunks import SCALAR_HEAD
from grpo_mega.models.model import Model
from grpo_mega.models.shards import Box, named_box, shards
from grpo_mega.weights.names import NamedTensor, Region

Held = dict[str, dict[Box, torch.Tensor]]
"""Name of a Megatron tensor -> position of this rank's shards -> shards."""


@dataclass(frozen=True)
class Parts:
    """This rank's shards of a policy's tensors.

    Attributes:
        held: The shards, which share the model's memory.
        numbers: {(name of a fused Megatron tensor, first row of one of its tensors): number of that tensor}.
        rank: Rank of the adapters; 0 without adapters.
        scale: Scale of the adapters' product.
    """

    held: Held
    numbers: dict[tuple[str, int], int]
    rank: int
    scale: float

    def merged(self, entry: NamedTensor, box: Box, source: Region) -> torch.Tensor:
        """The slice `source` of the shard at `box`, with its adapter merged in fp32 and rounded to the shard's dtype.

        Without an adapter it is a view of the model's memory, otherwise a new tensor.
        """
        part, layer = self.held[entry.key][box][source], entry.key.removesuffix(".weight")
        if not (self.rank and layer + A in self.held):
            return part
        rows, columns = box
        # A fused tensor (queries, keys, values) has one A of `rank` rows per part, stacked in the order of the parts.
        first = self.numbers[entry.key, entry.rows.start] * self.rank
        (a,) = (inputs for (_, where), inputs in self.held[layer + A].items() if where == columns)
        a, b = a[first : first + self.rank, source[1]], self.held[layer + B][rows, (0, self.rank)][source[0]]
        # Computed in fp32 and rounded once; in the shard's dtype the product would be rounded before the sum.
        return torch.addmm(part.float(), b.float(), a.float(), alpha=self.scale).to(part.dtype)


def merged_bytes(model: ModelConfig, lora: LoRAConfig, tp: int, bucket: float) -> float:
    """Extra bytes on a rank for merging adapters while a bucket of `bucket` bytes is made; 0 without adapters.

    They are the bucket's merged weights before they are joined into a message and, in fp32, the largest matrix shard
    and its sum.
    """
    if not lora.rank:
        return 0.0
    # The matrix with the most elements decides. In a mixture of experts the dense layers and the shared experts count
    # as mlp.
    inner = {
        "attention": model.heads * head_channels(model),
        "mlp": model.ffn_hidden if model.moe.first_dense or not model.moe.experts else model.moe.shared_ffn_hidden,
        "experts": model.moe.ffn_hidden if model.moe.experts else 0,
    }
    if model.attention == "mla":
        mla = model.mla
        queries = 0 if mla.q_lora_rank else mla.qk_head_dim + mla.qk_rope_dim
        inner["attention"] = model.heads * max(mla.v_head_dim, queries)
    largest = model.hidden * max(size for target, size in inner.items() if target in lora.targets) / tp
    return bucket + 2 * torch.float32.itemsize * largest


def parts_of(policy: Model, wanted: list[NamedTensor]) -> Parts:
    """This rank's shards of the policy's tensors and adapters; `wanted` are all tensors of the model.

    For a model with a scalar head, only those of the body are returned: no Hugging Face tensor corresponds to the head.

    Raises:
        ValueError: The model has a tensor without Hugging Face name.
    """
    held: Held = defaultdict(dict)
    for shard in shards(policy.chunks):
        key, box = named_box(shard)
        if not key.startswith(SCALAR_HEAD):
            held[key][box] = shard.data
    # A tensor without a name would be missing in every export and engine without any error.
    known = {entry.key for entry in wanted}
    if unknown := [key for key in held if key not in known and not key.endswith((A, B))]:
        raise ValueError(f"no Hugging Face tensor stands for {', '.join(sorted(unknown))}")
    # Parts of a fused tensor are numbered by their first row, which is the order of their adapters in A.
    starts: dict[str, set[int]] = defaultdict(set)
    for entry in wanted:
        starts[entry.key].add(entry.rows.start)
    numbers = {(key, start): number for key, all_of in starts.items() for number, start in enumerate(sorted(all_of))}
    lora = policy.lora
    return Parts(dict(held), numbers, lora.rank if lora else 0, lora.alpha / lora.rank if lora else 0.0)
