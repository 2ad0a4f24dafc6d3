"""What a policy leaves in torch's cache after it was built; needs a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ranks import results, run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_where_the_weights_were_before_is_given_back() -> None:
    """They move into Megatron's buffers: the model's own size would stay reserved beside them."""
    found = results(run_ranks(Path(__file__).with_name("gpu_policy_job.py"), 1, []))
    assert found["weights"] > 256 * 2**20, json.dumps(found)
    assert found["reserved"] - found["allocated"] < found["weights"] / 4, json.dumps(found)
