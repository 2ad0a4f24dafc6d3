"""Reward functions of a library that takes a while to import."""

from __future__ import annotations

import numpy as np
import torch

from grpo_mega.types import Sample


def draws_a_tensor(_: Sample) -> float:
    return torch.rand(()).item()


def returns_a_tensor(_: Sample) -> torch.Tensor:
    return torch.tensor(1.0)


def returns_single_precision(_: Sample) -> np.float32:
    return np.float32(0.5)
