"""Peaks of GPUs: found by the names that CUDA gives them."""

from __future__ import annotations

import pytest
import torch

from grpo_mega.platform import Platform
from grpo_mega.platform.peaks import known_peak, peak_tflops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", None),
        ("NVIDIA H1000", None),
        ("", None),
    ],
)
def test_a_device_has_the_peak_of_its_kind_or_none(name: str, peak: float | None) -> None:
    assert known_peak(name) == peak


def test_a_cpu_has_none() -> None:
    assert peak_tflops(Platform(torch.device("cpu"), "gloo", False), "bf16") is None
