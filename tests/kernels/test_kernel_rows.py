"""The row operations in plain torch against float64, on the rows that break kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from row_cases import ADVERSARIAL, OPTIONS, case, check_gradient, check_grpo, check_masked, check_stats

from grpo_kernels import LossOptions, rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
changes = pytest.mark.parametrize("change", ADVERSARIAL.values(), ids=ADVERSARIAL.keys())


@changes
@pytest.mark.parametrize("columns", [2, 13, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_and_entropies(change: Callable, columns: int, dtype: torch.dtype) -> None:
    check_stats(rows, case(columns, change, dtype=dtype))


@pytest.mark.parametrize("columns", [1, 4099, 151936])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("listed", [False, True])
def test_log_probs_of_other_vocabularies(columns: int, dtype: torch.dtype, listed: bool) -> None:
    check_stats(rows, case(columns, dtype=dtype, listed=listed))


@changes
@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradients(change: Callable, with_entropy: bool) -> None:
    check_gradient(rows, case(61, change), with_entropy, "zero", None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("others", ["zero", "leave"])
@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.bfloat16])
def test_gradients_go_where_they_are_wanted(
    dtype: torch.dtype, listed: bool, others: str, out_dtype: torch.dtype | None
) -> None:
    check_gradient(rows, case(61, dtype=dtype, listed=listed), True, others, out_dtype)


@pytest.mark.parametrize("columns", [1, 4099, 151936])
def test_gradients_of_other_vocabularies(columns: int) -> None:
    check_gradient(rows, case(columns, count=3), True, "zero", None)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("gradient", [False, True])
def test_losses_of_rows(options: LossOptions, old: bool, gradient: bool) -> None:
    check_grpo(rows, case(61), options, old, "zero", gradient)
    check_grpo(rows, case(61, listed=True), options, old, "leave", gradient, torch.bfloat16, -1.7)


def test_what_the_correction_masks_has_no_gradient_whatever_it_holds() -> None:
    check_masked(rows)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_row_breaks_no_other(broken: float) -> None:
    x = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    ids, ones = torch.tensor([3, 4, 5]), torch.ones(3)
    stats = rows.row_stats(x, ids, None, 50, 1.0)
    gradient = torch.empty_like(x)
    rows.row_gradient_(x, ids, None, 50, 1.0, stats, ones, ones, "zero", out=gradient)
    x[1, 20] = broken
    found = rows.row_stats(x, ids, None, 50, 1.0)
    rows.row_gradient_(x, ids, None, 50, 1.0, found, ones, ones, "zero")
    assert torch.equal(found[[0, 2]], stats[[0, 2]])
    assert torch.equal(x[[0, 2]], gradient[[0, 2]])
    assert rows.logprob_and_entropy(found, 1.0)[0].isfinite().tolist() == [True, False, True]


def test_a_row_of_minus_infinity() -> None:
    x = torch.full((1, 7), -torch.inf)
    stats = rows.row_stats(x, torch.tensor([2]), None, 7, 0.5)
    assert stats.tolist() == [[-torch.inf, 0.0, 0.0, -torch.inf]]
    assert rows.logprob_and_entropy(stats, 0.5)[0].isnan().all()


@settings(deadline=None)
@given(st.integers(1, 300), st.sampled_from([-3e4, -1.0, 64.0, 1e4]), st.integers(0, 2**31))
def test_log_probs_do_not_see_a_shift_and_gradient_rows_sum_to_zero(columns: int, shift: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-40, 40, (4, columns), generator=generator) / 8  # multiples of 1/8 stay exact when shifted
    ids = torch.randint(0, columns, (4,), generator=generator)
    stats = rows.row_stats(x, ids, None, columns, 0.7)
    shifted = rows.row_stats(x + shift, ids, None, columns, 0.7)
    assert torch.equal(
        torch.stack(rows.logprob_and_entropy(stats, 0.7)), torch.stack(rows.logprob_and_entropy(shifted, 0.7))
    )
    by_logprob = torch.randn(4, generator=generator)
    rows.row_gradient_(x, ids, None, columns, 0.7, stats, by_logprob, -by_logprob, "zero")
    torch.testing.assert_close(x.sum(-1), torch.zeros(4), atol=2e-6, rtol=0.0)


def test_rows_do_not_depend_on_their_number() -> None:
    """More than one piece, and more than 65,535 rows."""
    x = torch.randn(70_000, 11, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(70_000) % 11
    stats = rows.row_stats(x, ids, None, 11, 1.0)
    few = torch.tensor([0, 1, 11_914, 11_915, 65_535, 65_536, 69_999])
    assert torch.equal(stats[few], rows.row_stats(x, ids[few], few, 11, 1.0))
    assert torch.equal(
        stats[few], torch.cat([rows.row_stats(x[i : i + 1], ids[i : i + 1], None, 11, 1.0) for i in few])
    )


def test_no_row_at_all() -> None:
    nothing, x = torch.zeros(0, dtype=torch.int64), torch.ones(2, 5)
    assert rows.row_stats(x, nothing, nothing, 5, 1.0).shape == (0, 4)
    rows.row_gradient_(x, nothing, nothing, 5, 1.0, torch.zeros(0, 4), torch.zeros(0), None, "zero")
    assert not x.any()
