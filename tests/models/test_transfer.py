"""Copies to the host are the numbers, whatever the stage that they pass through has room for."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.models.transfer import PipelineStage, float_copies


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 30))
def test_numbers_arrive_in_their_places_through_a_stage_of_any_size(sizes: list[int], room: int) -> None:
    stage, sources = PipelineStage(room), [torch.rand(size) for size in sizes]
    targets = [torch.full((size,), torch.nan) for size in sizes]
    for source, target in zip(sources, targets, strict=True):
        stage.pass_on(source, target)
    stage.arrive()
    assert all(torch.equal(*pair) for pair in zip(sources, targets, strict=True))


def test_copies_are_float32_and_share_no_memory() -> None:
    tensors = [torch.rand(3, 4), torch.rand(5).bfloat16(), torch.rand(6)[2:4]]
    copies = float_copies(iter(tensors))
    assert [copy.dtype for copy in copies] == [torch.float32] * 3
    assert all(torch.equal(copy, tensor.float()) for copy, tensor in zip(copies, tensors, strict=True))
    tensors[0].zero_()
    assert copies[0].all()
    assert copies[2].untyped_storage().nbytes() == 2 * 4  # of its own: what is written has no other numbers
