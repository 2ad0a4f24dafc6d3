"""Random weights of a model under Hugging Face's names, the same in every order of tests."""

from __future__ import annotations

import torch

from grpo_mega.config.schema import ModelConfig
from grpo_mega.weights.names import entries


def random_weights(model: ModelConfig, vocabulary: int) -> dict[str, torch.Tensor]:
    """Normal with deviation 0.1, norms from 0.5 up. None is zero, which the shortest step would move."""
    generator = torch.Generator().manual_seed(0)
    tensors = {entry.name: 0.1 * torch.randn(entry.shape, generator=generator) for entry in entries(model, vocabulary)}
    tensors = {name: tensor.masked_fill(tensor == 0, 0.1) for name, tensor in tensors.items()}
    return tensors | {name: tensor.abs() + 0.5 for name, tensor in tensors.items() if "norm" in name}
