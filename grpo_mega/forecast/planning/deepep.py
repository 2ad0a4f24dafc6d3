"""Bytes of a GPU that DeepEP keeps for the exchange of tokens between experts, outside of torch's memory.

Megatron asks DeepEP for buffers as large as it recommends (`get_nvl_buffer_size_hint` and `get_rdma_buffer_size_hint`
of its csrc/config.hpp, for the settings of `get_dispatch_config` in its buffer.py), once for all layers.
"""

from __future__ import annotations

from grpo_mega.config.rules.layout import DEEPEP_MACHINE
from grpo_mega.config.schema import Config

CHANNELS = 10
"""Half of the 20 multiprocessors that Megatron gives it (`moe_deepep_num_sms`)."""
RDMA_ROWS = 140
"""Rows that a channel has from every other machine: 128, rounded up to a multiple of what is sent at once, 28."""
BESIDE = 8 + 128 * (8 + 4 + 4)
"""Bytes beside the numbers of a row: where it comes from; up to 128 experts with their weights, and scales."""
SPARE = 1 << 20
"""Bytes that it adds to be safe."""
WORKSPACE = 32 << 20
"""Bytes of its workspace."""


def deepep_bytes(config: Config) -> float:
    """Bytes of DeepEP's buffers on a GPU; none without `layout.dispatch=deepep` and experts of other GPUs."""
    ranks = config.layout.ep
    if config.layout.dispatch != "deepep" or ranks == 1:
        return 0.0
    row = 2 * config.model.hidden + BESIDE
    near, machines = min(ranks, DEEPEP_MACHINE), ranks // DEEPEP_MACHINE
    inside = CHANNELS * near * _rows(ranks) * row
    across = CHANNELS * machines * RDMA_ROWS * 2 * (row + 16) + SPARE if machines > 1 else 0  # to send and to receive
    return float(inside + across + WORKSPACE)


def _rows(ranks: int) -> int:
    """Rows that a channel has from every GPU of the machine."""
    if ranks <= DEEPEP_MACHINE:
        return 256
    return 288 if ranks <= 64 else 560 if ranks <= 128 else 720
