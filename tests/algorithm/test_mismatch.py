"""What the trainer scores against what the engine sampled."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mega.algorithm.mismatch import explained_by_rounding, rollout_mismatch


def test_agreement() -> None:
    logprob = -torch.rand(50, generator=torch.Generator().manual_seed(0))
    assert rollout_mismatch(logprob, logprob.clone()) == {
        "mean_abs": 0.0,
        "max_abs": 0.0,
        "p50_abs": 0.0,
        "p90_abs": 0.0,
        "p99_abs": 0.0,
        "mean_ratio": 1.0,
        "effective_sample_size": 1.0,
    }


def test_worked_example() -> None:
    got = rollout_mismatch(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.0 - math.log(3)]))
    assert got == pytest.approx(
        {
            "mean_abs": math.log(3) / 2,
            "max_abs": math.log(3),
            "p50_abs": 0.0,
            "p90_abs": math.log(3),
            "p99_abs": math.log(3),
            "mean_ratio": 2.0,
            "effective_sample_size": (1 + 3) ** 2 / (2 * (1 + 9)),
        }
    )


def test_percentile_ignores_the_worst_hundredth_and_nothing_more() -> None:
    rollout = -torch.arange(1, 201, dtype=torch.float32)
    got = rollout_mismatch(torch.zeros(200), rollout)
    assert got["p99_abs"] == 198
    assert got["max_abs"] == 200


@given(st.lists(st.tuples(st.floats(-20, 0, width=32), st.floats(-20, 0, width=32)), min_size=1, max_size=40))
@settings(max_examples=60)
def test_equals_plain_python(pairs: list[tuple[float, float]]) -> None:
    trainer, engine = torch.tensor(pairs).unbind(1)
    got = rollout_mismatch(trainer.requires_grad_(), engine)
    distances = sorted(abs(a - b) for a, b in pairs)
    ratios = [math.exp(a - b) for a, b in pairs]
    n = len(pairs)
    assert got["mean_abs"] == pytest.approx(sum(distances) / n)
    assert got["max_abs"] == distances[-1]
    for percent in (50, 90, 99):
        assert got[f"p{percent}_abs"] == distances[-(-percent * n // 100) - 1]
    assert got["mean_ratio"] == pytest.approx(sum(ratios) / n)
    assert got["effective_sample_size"] == pytest.approx(sum(ratios) ** 2 / (n * sum(r * r for r in ratios)))
    assert 1 / n * (1 - 1e-9) <= got["effective_sample_size"] <= 1 + 1e-9


@pytest.mark.parametrize(
    ("differences", "size"),
    [
        ([800.0, 0.0, 0.0], 1 / 3),  # exp(800) is infinite in float64
        ([800.0, 800.0, 0.0, 0.0], 2 / 4),
        ([400.0, 400.0], 1.0),  # exp(400) is not, its square is
        ([-800.0, -800.0, -800.0], 1.0),
        ([math.inf, 3.0], 1 / 2),
        ([-math.inf, 3.0], 1 / 2),
    ],
)
def test_an_overflow_of_the_ratio_does_not_hide_the_effective_sample_size(
    differences: list[float], size: float
) -> None:
    got = rollout_mismatch(torch.tensor(differences), torch.zeros(len(differences)))
    assert got["effective_sample_size"] == pytest.approx(size)


@given(st.lists(st.floats(-20, 0), min_size=1, max_size=20), st.floats(-1e4, 1e4))
def test_the_effective_sample_size_does_not_depend_on_the_scale_of_the_ratios(
    log_ratios: list[float], by: float
) -> None:
    here = torch.tensor(log_ratios, dtype=torch.float64)
    sizes = [rollout_mismatch(x, torch.zeros_like(x))["effective_sample_size"] for x in (here, here + by)]
    assert sizes[1] == pytest.approx(sizes[0], rel=1e-6)


def test_small_differences_are_measured_in_float64() -> None:
    n = 100_000
    got = rollout_mismatch(torch.full((n,), -1e-4), torch.zeros(n))
    assert got["mean_abs"] == pytest.approx(float(torch.tensor(1e-4)), rel=1e-9)


def test_nothing_trained_gives_nothing() -> None:
    assert rollout_mismatch(torch.zeros(0), torch.zeros(0)) == {}


def test_nan_is_not_hidden() -> None:
    got = rollout_mismatch(torch.tensor([-1.0, math.nan, -1.0]), torch.full((3,), -1.0))
    assert all(math.isnan(value) for value in got.values())


@pytest.mark.parametrize("shape", [(1,), (3, 1), (2,)])
def test_vectors_of_different_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="of one length"):
        rollout_mismatch(torch.zeros(3), torch.zeros(shape))


def test_coarser_numbers_explain_more() -> None:
    fp32, bf16, fp8 = (explained_by_rounding(*how) for how in (("fp32", False), ("bf16", False), ("bf16", True)))
    assert 0 < fp32 < bf16 < fp8
    with pytest.raises(ValueError, match="dtype is 'fp16'; use fp32 or bf16"):
        explained_by_rounding("fp16", False)


@pytest.mark.parametrize("seed", range(3))
def test_rounding_large_logits_to_bf16_is_explained_and_wrong_logits_are_not(seed: int) -> None:
    """Logits of a sure model, up to 32: their roundings on both sides are told from those of another model."""
    generator = torch.Generator().manual_seed(seed)
    logits = 8 * torch.randn(512, 1000, generator=generator).clamp(-4, 4)
    tokens = torch.distributions.Categorical(logits=logits).sample()

    def difference(other: torch.Tensor) -> float:
        ours, theirs = (x.log_softmax(-1).gather(1, tokens[:, None])[:, 0] for x in (logits, other))
        return rollout_mismatch(ours, theirs)["mean_abs"]

    rounded = logits.bfloat16().float()
    explained = explained_by_rounding("bf16", fp8=False)
    assert explained_by_rounding("fp32", fp8=False) < difference(rounded) < explained
    assert difference(logits + 0.5 * torch.randn(logits.shape, generator=generator)) > explained
