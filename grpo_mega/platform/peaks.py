"""Peak compute rates of GPUs, as published by their makers, for Model FLOPs utilization."""

from __future__ import annotations

from grpo_mega.platform import Platform

BF16_TFLOPS = {
    "GB200": 2500.0, "B200": 2250.0,  # NVIDIA Blackwell architecture technical brief, 2024
    "H200 NVL": 835.0, "H200": 989.0,  # NVIDIA H200 data sheet, 2024
    "H100 NVL": 835.0, "H100 PCIe": 756.0, "H100": 989.0, "GH200": 989.0,  # NVIDIA H100 and GH200 data sheets, 2023
    "H800": 989.0, "H20": 148.0,  # as H100, but for its links; NVIDIA H20 data sheet, 2024
    "A100": 312.0, "A800": 312.0,  # NVIDIA A100 data sheet, 2021
    "L40S": 362.0, "L40": 181.0,  # NVIDIA L40S and L40 data sheets, 2023
}  # fmt: skip
"""Part of a device's name -> peak rate with dense bfloat16 matrices in 10^12 operations a second; the first match
counts."""


def peak_tflops(platform: Platform, dtype: str) -> float | None:
    """Peak rate of this process's GPU in a model's `dtype`, in 10^12 operations a second; None on a CPU, for GPUs that
    are not in the table, and for other types than bf16."""
    import torch

    if platform.device.type != "cuda" or dtype != "bf16":
        return None
    return known_peak(torch.cuda.get_device_name(platform.device))


def known_peak(name: str) -> float | None:
    """Peak rate from the table for a device with this CUDA name; None if it is not in the table."""
    words = f" {name.replace('-', ' ')} "
    return next((peak for part, peak in BF16_TFLOPS.items() if f" {part} " in words), None)
