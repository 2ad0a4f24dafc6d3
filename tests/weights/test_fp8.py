"""Weights in fp8: how far from the original, and which configurations mean them."""

from __future__ import annotations

import re

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.platform import start

start()  # before megatron.core is imported

from huggingface_models import MODELS, VOCAB, WITH_MTP  # noqa: E402

from grpo_mega.algorithm.mismatch import explained_by_rounding  # noqa: E402
from grpo_mega.weights import fp8  # noqa: E402
from grpo_mega.weights.fp8 import quantised  # noqa: E402
from grpo_mega.weights.names import entries  # noqa: E402


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


def test_the_largest_number_of_each_block_is_the_largest_of_the_format() -> None:
    weight = torch.randn(130, 200, generator=torch.Generator().manual_seed(1))
    weight[129, 199] = -50.0
    content, scale = quantised(weight)
    for rows in (slice(0, 128), slice(128, 130)):
        for columns in (slice(0, 128), slice(128, 200)):
            largest = weight[rows, columns].abs().max()
            assert content[rows, columns].float().abs().max() == 448
            assert scale[rows.start // 128, columns.start // 128] == pytest.approx(largest.item() / 448)


def test_a_block_of_zeros_stays_so() -> None:
    content, scale = quantised(torch.zeros(3, 130))
    assert not content.float().any()
    assert scale.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3", "qwen3_moe", "moonlight"])
def test_which_tensors_of_a_model(name: str) -> None:
    """All matrices but embeddings, routers, the output layer and what joins a prediction module to the model."""
    model = WITH_MTP if name == "deepseek_v3" else MODELS[name]
    others = re.compile(r"embed_tokens|lm_head|mlp\.gate\.|eh_proj")
    for entry in entries(model, VOCAB):
        assert fp8.in_fp8(entry.name) == (len(entry.shape) == 2 and not others.search(entry.name)), entry.name


def test_a_bucket_keeps_what_is_not_in_fp8() -> None:
    bucket = [(f"model.layers.0.{name}.weight", torch.randn(130, 40)) for name in ("mlp.gate", "mlp.up_proj")]
    (router, gate), (up, content), (scales, scale) = fp8.quantised_bucket(bucket)
    assert (router, up, scales) == (bucket[0][0], bucket[1][0], bucket[1][0] + "_scale_inv")
    assert torch.equal(gate, bucket[0][1])
    assert (content.dtype, content.shape) == (torch.float8_e4m3fn, (130, 40))
    assert (scale.dtype, scale.shape) == (torch.float32, (2, 1))


def test_log_probs_of_rounded_weights_are_near() -> None:
    """Well within what a push in fp8 is verified with, in transformers' Qwen3 of random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"num_hidden_layers": 4, "head_dim": 64, "vocab_size": 500, "initializer_range": 0.1}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **more)).eval()
    tokens = torch.arange(64)[None] ** 2 % 500

    def logprobs() -> torch.Tensor:
        with torch.no_grad():
            scores = model(tokens).logits.log_softmax(-1)[0, :-1]
        return scores.gather(1, tokens[0, 1:, None])[:, 0]

    before = logprobs()
    stored = dict(fp8.quantised_bucket(model.state_dict().items()))
    scales = {name: stored.pop(name + fp8.SCALE) for name in [*stored] if fp8.in_fp8(name)}
    assert len(scales) == 4 * 7
    for name, scale in scales.items():
        whole = tuple(slice(0, size) for size in stored[name].shape)
        stored[name] = fp8.dequantised(stored[name], scale, whole)
    model.load_state_dict(stored)
    moved = (logprobs() - before).abs().mean()
    assert 0.01 < moved < 0.5 * explained_by_rounding("bf16", fp8=True)


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
