"""How experiment=tiny_sglang differs where there is a GPU.

Kernels there want bf16 and heads of 128 channels; and what leaves the GPU has to be far more than what may stay, half a
GiB: 4.5 GB of weights, optimizer, gradients and reference policy, and a cache of 16 KB for each token.
"""

import torch

CUDA = torch.cuda.is_available()
SETTINGS = [
    "model.dtype=bf16",
    "model.layers=8",
    "model.hidden=1024",
    "model.heads=8",
    "model.kv_heads=4",
    "model.head_dim=128",
    "model.moe.ffn_hidden=2048",
    "optimizer.lr=3e-4",
]
TINY = SETTINGS if CUDA else []
"""Settings to add."""
CLOSE = 0.5 if CUDA else 1e-4
"""How far log-probs of engine and trainer may be apart: rounding of bf16 or fp32, at the worst of many tokens."""
