"""Run by test_triton_rows.py with TRITON_INTERPRET=1, which must be set before anything imports triton."""

from __future__ import annotations

import pytest
import row_cases
import torch

from grpo_kernels import rows, triton_rows
from grpo_kernels.token_loss import Tokens
from grpo_kernels.vocab_parallel import merge_stats

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
row_cases.ROUNDING[torch.bfloat16] = 2**-7  # the interpreter cuts off bits where a GPU rounds


@pytest.mark.parametrize("name", row_cases.ADVERSARIAL)
@pytest.mark.parametrize("columns", [1, 13, 1000, 4099, 8192])
def test_statistics_of_hostile_rows(name, columns):
    row_cases.check_stats(triton_rows, row_cases.case(columns, row_cases.ADVERSARIAL[name], count=2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("listed", [False, True])
def test_statistics_in_every_precision(dtype, listed):
    row_cases.check_stats(triton_rows, row_cases.case(4099, dtype=dtype, listed=listed))


def test_statistics_of_a_real_vocabulary():
    row_cases.check_stats(triton_rows, row_cases.case(151936, dtype=torch.bfloat16, count=2))


@pytest.mark.parametrize("name", row_cases.ADVERSARIAL)
def test_gradient_of_hostile_rows(name):
    case = row_cases.case(4099, row_cases.ADVERSARIAL[name])
    row_cases.check_gradient(triton_rows, case, True, "zero", None)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("others", ["zero", "leave"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16])
def test_gradient_goes_where_it_should(listed, others, dtype, out_dtype):
    case = row_cases.case(1000, dtype=dtype, listed=listed)
    row_cases.check_gradient(triton_rows, case, listed, others, out_dtype)


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize(
    ("options", "name"),
    [(options, "plain") for options in row_cases.OPTIONS]
    + [(options, name) for options in ("ppo, all of it", "mask") for name in ("first block -inf", "offset 1e4")],
)
def test_loss_and_gradient_in_one_launch(options, old, name):
    case = row_cases.case(1000, row_cases.ADVERSARIAL[name])
    row_cases.check_grpo(triton_rows, case, row_cases.OPTIONS[options], old, "zero", True)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("others", ["zero", "leave"])
@pytest.mark.parametrize("gradient", [False, True])
def test_loss_of_chosen_rows(listed, others, gradient):
    case = row_cases.case(4099, dtype=torch.bfloat16, listed=listed)
    row_cases.check_grpo(triton_rows, case, row_cases.OPTIONS["ppo, all of it"], True, others, gradient)


@pytest.mark.parametrize("options", ["ppo, all of it", "mask"])
@pytest.mark.parametrize("logits_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("others", ["zero", "leave"])
def test_a_scaled_gradient_beside_the_logits(options, logits_dtype, others):
    """As for a chunk of float32 logits of a bfloat16 weight."""
    case = row_cases.case(1000, dtype=logits_dtype)
    row_cases.check_grpo(triton_rows, case, row_cases.OPTIONS[options], True, others, True, torch.bfloat16, -1.7)


def test_what_the_correction_masks_has_no_gradient_whatever_it_holds():
    row_cases.check_masked(triton_rows)


def test_a_row_of_minus_infinity_and_one_of_nan_stay_alone():
    case = row_cases.case(5000)
    exact = case.exact
    case.logits[0, :5000] = -torch.inf
    case.logits[3, 4321] = torch.nan
    stats = triton_rows.row_stats(case.logits, case.ids, None, 5000, 1.0)
    assert stats[0].tolist() == [-torch.inf, 0.0, 0.0, -torch.inf]
    logprob, _ = rows.logprob_and_entropy(
        triton_rows.row_stats(case.logits, case.ids, None, 5000, 1 / case.temperature), 1 / case.temperature
    )
    assert logprob.isnan().tolist() == [True, False, False, True, False, False]
    row_cases.near(logprob[[1, 2, 4, 5]], exact.logprob[[1, 2, 4, 5]], 1e-5, 0)


def test_a_ratio_that_overflows_stays_in_its_row():
    case = row_cases.case(1000, temperature=1.0)
    logprob = case.exact.logprob.float()
    old = logprob - torch.tensor([200.0, 200.0, -200.0, -200.0, 0.0, 0.0])
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    tokens = Tokens(advantage, torch.ones(6), old)
    outputs = triton_rows.grpo_rows_(
        case.logits, case.ids, None, 1000, 1.0, tokens, row_cases.OPTIONS["ppo"], True, "zero"
    )
    expected = torch.tensor([-1.28, torch.inf, 0.0, 0.8, -1.0, 1.0])
    row_cases.near(outputs[:, 0], expected, 1e-5, 1e-4)
    assert outputs[:, 4].tolist() == [2.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    assert case.logits[[0, 2, 3], :1000].abs().max() < 1e-6
    assert case.logits[[4, 5], :1000].isfinite().all()


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_shards_merge_to_the_whole(shards):
    case = row_cases.case(4096)
    width = 4096 // shards
    parts = [
        triton_rows.row_stats(case.logits[:, k * width :], case.ids - k * width, None, width, 1 / case.temperature)
        for k in range(shards)
    ]
    stats = merge_stats(parts, 1 / case.temperature)
    logprob, entropy = rows.logprob_and_entropy(stats, 1 / case.temperature)
    row_cases.near(logprob, case.exact.logprob, 1e-5, 0)
    row_cases.near(entropy, case.exact.entropy, 1e-5, 0)


def test_a_row_gives_the_same_bits_among_any_number_of_rows():
    case = row_cases.case(3000, count=12)
    together = triton_rows.row_stats(case.logits, case.ids, None, 3000, 1.0)
    alone = [triton_rows.row_stats(case.logits[i : i + 1], case.ids[i : i + 1], None, 3000, 1.0) for i in range(12)]
    assert torch.equal(together, torch.cat(alone))


def test_no_rows_and_no_columns():
    nothing = torch.empty(0, 10)
    no_ids = torch.empty(0, dtype=torch.int64)
    empty = torch.empty(0)
    assert triton_rows.row_stats(nothing, no_ids, None, 10, 1.0).shape == (0, 4)
    outputs = triton_rows.grpo_rows_(
        nothing, no_ids, None, 10, 1.0, Tokens(empty, empty), row_cases.OPTIONS["ppo"], True, "zero"
    )
    assert outputs.shape == (0, 7)
    logits = torch.full((3, 10), torch.nan)  # nothing listed: everything becomes 0
    triton_rows.row_gradient_(logits, no_ids, no_ids, 10, 1.0, torch.empty(0, 4), empty, None, "zero")
    assert (logits == 0).all()
    padding = torch.full((2, 4), torch.nan)  # a shard that holds nothing but padding
    stats = triton_rows.row_stats(padding, torch.tensor([-3, 7]), None, 0, 1.0)
    assert stats.tolist() == [[-torch.inf, 0.0, 0.0, -torch.inf]] * 2


def test_padding_gets_no_gradient_even_where_another_shard_s_target_would_lie():
    logits = torch.zeros(2, 8)
    logits[:, 5:] = torch.nan
    ids, one = torch.tensor([6, -1]), torch.ones(2)
    stats = triton_rows.row_stats(logits, ids, None, 5, 1.0)
    assert stats[:, 3].tolist() == [-torch.inf] * 2
    triton_rows.row_gradient_(logits, ids, None, 5, 1.0, stats, one, one, "zero")
    row_cases.near(logits[:, :5], torch.full((2, 5), -0.2), 1e-6, 0)
    assert (logits[:, 5:] == 0).all()
