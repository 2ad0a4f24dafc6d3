"""Operations and parameters that are counted, against what was published of the models."""

from __future__ import annotations

import pytest
from composed import composed
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega import platform

platform.start()


DEEPSEEK, QWEN3_30B = ("experiment=r1zero_671b",), ("experiment=qwen3_30b_a3b",)
QWEN3_235B = (*QWEN3_30B, "model.layers=94", "model.hidden=4096", "model.heads=64", "model.moe.ffn_hidden=1536")

from grpo_mega.config.schema import Config, LoRAConfig  # noqa: E402
from grpo_mega.forecast.planning.counting import (  # noqa: E402
    adapter_numbers,
    dense_layers,
    gated,
    keys_seen,
    layer_ops,
    layers_of_stages,
    model_numbers,
    token_ops,
)
from grpo_mega.models.flops import learning_flops  # noqa: E402


def config(words: tuple[str, ...]) -> Config:
    return composed(*words, checked=False)


@pytest.mark.parametrize(
    ("words", "gflop"),
    [(DEEPSEEK, 276.03e3 / 1061.2), (QWEN3_30B, 299.35e3 / 13_011), (QWEN3_235B, 728e3 / 4916)],
)
def test_operations_of_a_token_are_those_that_throughput_was_published_with(
    words: tuple[str, ...], gflop: float
) -> None:
    """TFLOP/s over tokens per second, forward and backward, of sequences of 4,096 tokens; DeepSeek-V3 with MTP."""
    model = config(words).model
    found = learning_flops(model, model.vocab_size or 0, [4096], scored=4096) / 4096
    assert found / 1e9 == pytest.approx(gflop, rel=0.01)
    if not model.mtp_layers:
        assert 3 * token_ops(model, model.vocab_size or 0, 2048) / 1e9 == pytest.approx(gflop, rel=0.01)


@pytest.mark.parametrize("words", [DEEPSEEK, QWEN3_30B, QWEN3_235B, ("experiment=gsm8k_0.5b",)])
def test_layers_add_up_to_the_model(words: tuple[str, ...]) -> None:
    model, dense = config(words).model, dense_layers(config(words).model)
    per_layer = {experts: layer_ops(model, experts) for experts in (False, True)}
    each = {experts: ops.matmul + ops.grouped + 100 * ops.per_key for experts, ops in per_layer.items()}
    layers = dense * each[False] + (model.layers - dense) * each[True]
    assert token_ops(model, 1000, keys=100) == layers + 2 * model.hidden * 1000


@pytest.mark.parametrize(("words", "billions"), [(DEEPSEEK, 671.026), (QWEN3_30B, 30.532), (QWEN3_235B, 235.094)])
def test_numbers_of_whole_models_are_the_published_ones(words: tuple[str, ...], billions: float) -> None:
    model = config(words).model
    assert model_numbers(model, model.vocab_size or 0) / 1e9 == pytest.approx(billions, rel=1e-4)


def test_adapters_compute_little_and_their_matrices_are_counted_by_target() -> None:
    model = config(QWEN3_30B).model
    without = layer_ops(model, True)
    experts = layer_ops(model, True, LoRAConfig(rank=16, targets=["experts"]))
    every = layer_ops(model, True, LoRAConfig(rank=16))
    assert without.adapters == 0
    assert experts.adapters == 2 * 8 * 16 * 3 * (2048 + 768)
    assert experts.adapters < every.adapters < 0.2 * (without.matmul + without.grouped)
    assert adapter_numbers(gated(2048, 768), rank=16) == 16 * 3 * (2048 + 768)


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=20), st.integers(1, 3000), st.integers(0, 4))
def test_a_window_hides_tokens_and_no_layer_sees_more_than_all(lengths: list[int], window: int, every: int) -> None:
    full = keys_seen(lengths)
    assert full == pytest.approx(sum(n * n for n in lengths) / 2 / sum(lengths))
    seen = keys_seen(lengths, window, every)
    assert 0 < seen <= full * (1 + 1e-9)
    assert every == 1 or seen <= keys_seen(lengths, window + 100, every) * (1 + 1e-9)
    if every != 1 and window < max(lengths):
        assert seen < full


@pytest.mark.parametrize(
    ("words", "layers"),
    [
        ((), [16, 16, 16, 13]),
        (("layout.pp=16", "layout.first_stage_layers=3", "layout.last_stage_layers=2"), [3, *[4] * 14, 2]),
    ],
)
def test_layers_of_stages_are_those_of_the_rules(words: tuple[str, ...], layers: list[int]) -> None:
    found = config(("experiment=r1zero_671b", *words))
    assert layers_of_stages(found.model, found.layout) == layers
