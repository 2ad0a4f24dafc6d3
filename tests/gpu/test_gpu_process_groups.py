"""Groups of NCCL give memory back, and send again once they are resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import results, run_ranks
from torch._C._distributed_c10d import Backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not hasattr(Backend, "suspend"), reason="torch cannot suspend process groups before 2.12"),
]
JOB = Path(__file__).with_name("gpu_process_groups_job.py")


def test_suspended_and_resumed() -> None:
    ranks = min(2, torch.cuda.device_count())
    found = results(run_ranks(JOB, ranks, timeout=300))
    assert found["suspended"] == 2
    assert found["freed"] > 0 or ranks == 1
