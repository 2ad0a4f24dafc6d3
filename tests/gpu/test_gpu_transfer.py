"""Copies of the optimizer's state on their way to a checkpoint: the numbers, through pinned memory; needs a GPU."""

from __future__ import annotations

import pytest
import torch

from grpo_mega.models.transfer import float_copies

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("staged", [1 << 12, 1 << 20, 1 << 28])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_arrives_is_what_was_there(dtype: torch.dtype, staged: int) -> None:
    """Also of tensors that are larger than the pinned memory, of parts of others, and behind work that is queued."""
    torch.manual_seed(0)
    whole = torch.randn(3, 257, 129, device="cuda").to(dtype)
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):  # the copies are asked for while these run
        busy = busy @ busy
        busy /= busy.norm()
    tensors = [whole * 2, whole[1], whole[:, 3:5].transpose(1, 2), whole.flatten()[7:19], busy[:33].to(dtype)]
    expected = [tensor.cpu().float() for tensor in tensors]
    for _ in range(3):
        for copy, right in zip(float_copies(iter(tensors), staged), expected, strict=True):
            assert torch.equal(copy, right)


def test_a_number_that_changes_after_the_copy_does_not_change_it() -> None:
    tensor = torch.ones(1 << 22, device="cuda")
    [copy] = float_copies(iter([tensor]))
    tensor.zero_()
    torch.cuda.synchronize()
    assert copy.min() == 1
