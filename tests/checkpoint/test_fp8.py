"""Weights in fp8: how far from the original, and which configurations mean them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_fp8 import quantised

from grpo_mega.checkpoint.huggingface import fp8


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 2**31), st.floats(-30, 30))
def test_every_number_is_within_half_a_step_of_the_format(rows: int, columns: int, seed: int, exponent: float) -> None:
    """Three bits of mantissa; steps near 0 are as wide as those of the smallest normal number, 2^-6 of 448's scale."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 2**exponent
    weight[0, 0] = 0.0
    content, scale = quantised(weight)
    assert content.dtype == torch.float8_e4m3fn
    assert scale.shape == fp8.scale_shape(weight.shape)
    found = fp8.dequantised(content, scale, (slice(0, rows), slice(0, columns)))
    step = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns] * 2.0**-9
    bound = torch.maximum(weight.abs() * 2**-4, step / 2)
    assert ((found - weight).abs() <= bound * (1 + 1e-5)).all()


@given(st.integers(0, 299), st.integers(1, 300), st.integers(0, 199), st.integers(1, 200))
def test_a_part_is_that_part_of_the_whole(top: int, height: int, left: int, width: int) -> None:
    content, scale = quantised(torch.randn(300, 200, generator=torch.Generator().manual_seed(0)))
    part = slice(top, min(top + height, 300)), slice(left, min(left + width, 200))
    whole = fp8.dequantised(content, scale, (slice(0, 300), slice(0, 200)))
    assert torch.equal(fp8.dequantised(content[part], scale, part), whole[part])


def test_a_number_is_multiplied_by_the_scale_of_its_block() -> None:
    content = torch.full((130, 2), 2.0).to(torch.float8_e4m3fn)
    found = fp8.dequantised(content, torch.tensor([[0.5], [3.0]]), (slice(0, 130), slice(0, 2)))
    assert found.tolist() == [[1.0, 1.0]] * 128 + [[6.0, 6.0]] * 2


def test_a_block_of_zeros_stays_so() -> None:
    content, scale = quantised(torch.zeros(3, 130))
    assert not content.float().any()
    assert scale.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (fp8.CONFIG | {"activation_scheme": "dynamic"}, True),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, True),
        ({"quant_method": "fp8"}, False),
        (fp8.CONFIG | {"weight_block_size": [64, 128]}, False),
        (fp8.CONFIG | {"fmt": "e5m2"}, False),
        ({"quant_method": "awq"}, False),
        (None, False),
    ],
)
def test_which_configurations_mean_it(said: object, meant: bool) -> None:
    assert fp8.is_fp8(said) == meant
