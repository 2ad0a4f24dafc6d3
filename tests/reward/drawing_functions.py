"""Reward functions that are numbers of all generators, or come from libraries that take a while to import."""

from __future__ import annotations

import random

import numpy as np
import torch

from grpo_mega.types import Sample


def draws(_: Sample) -> float:
    return random.random() + 10 * np.random.random() + 100 * torch.rand(()).item()


def returns_a_tensor(_: Sample) -> torch.Tensor:
    return torch.tensor(1.0)


def returns_single_precision(_: Sample) -> np.float32:
    return np.float32(0.5)
