"""Groups of NCCL give memory back, and send again once they are resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import results, run_ranks

from grpo_mega.platform.process_groups import can_suspend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not can_suspend(), reason="it takes torch 2.12 and NCCL 2.29.7"),
]
JOB = Path(__file__).with_name("gpu_process_groups_job.py")


def test_suspended_and_resumed() -> None:
    ranks = min(2, torch.cuda.device_count())
    found = results(run_ranks(JOB, ranks, timeout=300))
    assert found["suspended"] == 2
    assert found["freed"] > 0 or ranks == 1
