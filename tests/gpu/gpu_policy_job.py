"""Builds a policy with the distributed optimizer on one GPU and prints bytes as JSON. Started by run_ranks."""

import json

import torch

from grpo_mega import platform

HERE = platform.start()
platform.join_processes(HERE)

from grpo_mega.config.schema import LayoutConfig, ModelConfig, OptimizerConfig  # noqa: E402
from grpo_mega.models.policy import Policy  # noqa: E402
from grpo_mega.models.topology import join_layout  # noqa: E402

MODEL = ModelConfig(layers=4, hidden=2048, heads=16, kv_heads=16, ffn_hidden=8192, context=128, dtype="bf16")

if __name__ == "__main__":
    policy = Policy(
        MODEL, LayoutConfig(), 1024, join_layout(LayoutConfig(), 0), HERE, OptimizerConfig(distributed=True)
    )
    found = {
        "weights": sum(p.numel() * p.element_size() for p in policy.chunks.parameters()),
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
    }
    print(json.dumps(found))
    torch.distributed.destroy_process_group()
