"""What adapters add to the memory of a rank, measured and planned; started by run_ranks under a tensor parallel layout.

Usage: adapted_memory_job.py; rank 0 prints as JSON {model: {what: {"measured": ..., "planned": ...}}} in bytes: of
activations that wait for a backward pass, for each token and each row of A more, and of a stream of merged weights
beyond a plain one.
"""

import gc
import json
import math
import warnings
from dataclasses import replace

import torch
from live_bytes import LiveBytes

from grpo_mega import platform

HERE = platform.start()
platform.join_processes(HERE)

from grpo_mega.algorithm.objective import negative_log_likelihood  # noqa: E402
from grpo_mega.config.schema import (  # noqa: E402
    LayoutConfig,
    LoRAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
)
from grpo_mega.forecast.planning.memory import IMBALANCE, Trainer, adapter_bytes  # noqa: E402
from grpo_mega.models.adapters import is_adapter  # noqa: E402
from grpo_mega.models.policy import Policy  # noqa: E402
from grpo_mega.models.topology import join_layout  # noqa: E402
from grpo_mega.types import Batch, pack_tokens  # noqa: E402
from grpo_mega.weights.merging import merged_bytes  # noqa: E402
from grpo_mega.weights.stream import hf_buckets  # noqa: E402

SIZE = torch.distributed.get_world_size()
LAYOUT = LayoutConfig(tp=SIZE, sp=SIZE > 1, micro_batch_tokens=256)
TOPOLOGY = join_layout(LAYOUT, seed=0)
VOCABULARY = 64
DENSE = ModelConfig(layers=2, hidden=64, heads=4, kv_heads=2, ffn_hidden=256, context=256, init_std=0.2)
EXPERTS = MoEConfig(experts=4, top_k=2, ffn_hidden=96, score="softmax", bias_update_rate=0.0)
MLA = MLAConfig(q_lora_rank=24, kv_lora_rank=20, qk_head_dim=12, qk_rope_dim=8, v_head_dim=16)
SHARED = replace(EXPERTS, shared_ffn_hidden=96, score="sigmoid", frozen_bias=True)
LATENT = replace(DENSE, kv_heads=4, attention="mla", qk_norm=True, mla=MLA, moe=SHARED)
MODELS = {
    "dense": (DENSE, ["attention", "mlp"]),
    "attention": (DENSE, ["attention"]),
    "experts": (replace(DENSE, qk_norm=True, moe=EXPERTS), ["experts"]),
    "shared": (LATENT, ["mlp"]),
    "latent": (LATENT, ["attention"]),
    "latent_direct": (replace(LATENT, mla=replace(MLA, q_lora_rank=None)), ["attention"]),
}
RANKS, TOKENS = (4, 12), (64, 192)
BUCKET = 40_000


def batch(tokens: int) -> Batch:
    """One sequence."""
    drawn = torch.randint(VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(5))
    packed = pack_tokens(drawn.tolist(), [tokens // 2])
    return packed.with_(weight=packed.mask / packed.mask.sum())


def made(model: ModelConfig, layout: LayoutConfig, lora: LoRAConfig | None) -> Policy:
    policy = Policy(model, layout, VOCABULARY, TOPOLOGY, HERE, lora=lora)
    policy.initialize(seed=3)
    return policy


def kept(model: ModelConfig, layout: LayoutConfig, lora: LoRAConfig, tokens: int) -> int:
    """Bytes of tensors that are kept for the backward pass of one micro-batch, weights aside."""
    policy = made(model, layout, lora)
    policy.initialize_adapters(seed=4)
    policy.use_optimizer(OptimizerConfig(lr=0.01))
    weights = {p.untyped_storage().data_ptr() for p in policy.chunks.parameters()}
    sizes: dict[int, tuple[torch.Tensor, int]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = (tensor, storage.nbytes())  # held, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        policy.update(batch(tokens), negative_log_likelihood, lr=0.01)
    return sum(size for _, size in sizes.values())


def activations(model: ModelConfig, layout: LayoutConfig, targets: list[str]) -> dict[str, float]:
    """For each token and row of A more, in all layers."""
    table = [[kept(model, layout, LoRAConfig(rank, 8.0, targets), tokens) for rank in RANKS] for tokens in TOKENS]
    measured = (table[1][1] - table[1][0] - table[0][1] + table[0][0]) / math.prod(b - a for a, b in (RANKS, TOKENS))
    trainer = Trainer(model, layout, LoRAConfig(1, 8.0, targets), OptimizerConfig())
    planned = sum(adapter_bytes(trainer, target) / (IMBALANCE if target == "experts" else 1) for target in targets)
    split = layout.tp if layout.sp else 1
    return {"measured": measured, "planned": model.layers * 2 * planned / split}


def peak(policy: Policy) -> int:
    """Bytes of a stream; more when gloo's threads let go of what they have sent a little later."""
    with LiveBytes() as inside:
        for bucket in hf_buckets(policy, BUCKET):
            bucket.clear()
    return inside.most


def merged(model: ModelConfig, layout: LayoutConfig, targets: list[str]) -> dict[str, float]:
    """Of a stream of weights, beyond one of a model without adapters; `LiveBytes` counts these as well."""
    lora, in_bf16 = LoRAConfig(8, 8.0, targets), replace(model, dtype="bf16")
    most = []
    for adapted in (None, lora):
        policy = made(in_bf16, layout, adapted)
        gc.collect()  # what is left of earlier models would count until it goes
        most.append(
            min(peak(policy) for _ in range(5))
            - sum(p.nbytes for name, p in policy.chunks.named_parameters() if is_adapter(name))
        )
    return {"measured": most[1] - most[0], "planned": merged_bytes(in_bf16, lora, layout.tp, BUCKET)}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    outcome = {
        name: {"activations": activations(model, LAYOUT, targets), "merged": merged(model, LAYOUT, targets)}
        for name, (model, targets) in MODELS.items()
    }
    if torch.distributed.get_rank() == 0:
        print(json.dumps(outcome))
    torch.distributed.destroy_process_group()
