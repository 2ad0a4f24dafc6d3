"""Factors of whole sequences and of the batch: plain Python agrees, and no other sequence or order changes them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mega.algorithm.correction import CorrectionOptions, correction_factors, share_beyond

Tokens = list[tuple[float, bool]]
"""(log-ratio, whether it is trained) of each token of a sequence."""

sequences = st.lists(st.lists(st.tuples(st.floats(-1, 1), st.booleans()), max_size=6), min_size=1, max_size=6)
options = st.builds(
    CorrectionOptions,
    kind=st.sampled_from(["none", "truncate", "mask"]),
    level=st.sampled_from(["token", "sequence", "sequence_mean"]),
    floor=st.sampled_from([0.0, 0.71]),
    cap=st.sampled_from([1.3, 2.1, math.inf]),
    rejection_floor=st.sampled_from([0.0, 0.83]),
    rejection_cap=st.sampled_from([1.17, math.inf]),
    normalized=st.booleans(),
)


def factors(batch: list[Tokens], how: CorrectionOptions) -> list[list[float]]:
    tokens = [token for sequence in batch for token in sequence]
    lengths = [len(sequence) for sequence in batch]
    got = correction_factors(
        torch.tensor([x for x, _ in tokens], dtype=torch.float64),
        torch.tensor([trained for _, trained in tokens], dtype=torch.bool),
        torch.tensor([0, *lengths]).cumsum(0),
        how,
    )
    return [part.tolist() for part in got.split(lengths)]


def plain(batch: list[Tokens], how: CorrectionOptions) -> list[list[float]]:
    """What the definitions say, one token after the other."""
    result = []
    for sequence in batch:
        trained = [x for x, is_trained in sequence if is_trained]
        mean = sum(trained) / max(len(trained), 1)
        of_level = {"sequence": sum(trained), "sequence_mean": mean}
        kept = how.rejection_floor <= math.exp(mean) <= how.rejection_cap
        row = []
        for x, is_trained in sequence:
            c = math.exp(of_level.get(how.level, x))
            if how.kind == "none":
                c = 1.0
            elif how.kind == "truncate":
                c = min(max(c, how.floor), how.cap)
            elif not how.floor <= c <= how.cap:
                c = 0.0
            row.append(c if is_trained and kept else 0.0)
        result.append(row)
    if how.normalized:
        of_tokens = [c for row in result for c in row if c]
        of_sequences = [max(row) for row in result if any(row)]
        counted = of_tokens if how.level == "token" else of_sequences
        if how.level != "token":  # a token that is not trained has a factor of 0, and all others the same
            assert all(len({c for c in row if c}) <= 1 for row in result)
        if counted:
            result = [[c / (sum(counted) / len(counted)) for c in row] for row in result]
    return result


@given(batch=sequences, how=options)
@settings(max_examples=300, deadline=None)
def test_equals_plain_python(batch: list[Tokens], how: CorrectionOptions) -> None:
    for got, expected in zip(factors(batch, how), plain(batch, how), strict=True):
        assert got == pytest.approx(expected, abs=1e-6, rel=1e-5)


@given(batch=sequences, how=options, data=st.data())
@settings(deadline=None)
def test_the_order_of_the_sequences_does_not_matter_and_nor_do_others_but_for_the_mean(
    batch: list[Tokens], how: CorrectionOptions, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(batch))))
    whole = factors(batch, how)
    for i, got in zip(order, factors([batch[i] for i in order], how), strict=True):
        assert got == pytest.approx(whole[i], rel=1e-6)
    alone = replace(how, normalized=False)
    assert [factors([sequence], alone)[0] for sequence in batch] == factors(batch, alone)


@given(
    batch=sequences,
    level=st.sampled_from(["token", "sequence", "sequence_mean"]),
    kind=st.sampled_from(["truncate", "mask"]),
)
def test_where_engine_and_trainer_agree_nothing_changes(batch: list[Tokens], level: str, kind: str) -> None:
    agreed = [[(0.0, is_trained) for _, is_trained in sequence] for sequence in batch]
    for normalized in (False, True):
        got = factors(agreed, CorrectionOptions(kind, level, 1.0, 1.0, 1.0, 1.0, normalized))
        assert got == [[float(is_trained) for _, is_trained in sequence] for sequence in agreed]


def test_products_that_overflow_are_bounded_and_a_nan_stays_in_its_sequence() -> None:
    batch = [[(400.0, True), (400.0, True)], [(-800.0, True)], [(math.nan, True), (0.0, True)], [(0.1, True)]]
    got = factors(batch, CorrectionOptions("truncate", "sequence", 0.5, 2.0))
    assert got[:2] == [[2.0, 2.0], [0.5]]
    assert all(map(math.isnan, got[2]))
    assert got[3] == [pytest.approx(math.exp(0.1))]


def test_a_geometric_mean_does_not_grow_with_the_length() -> None:
    batch = [[(0.01, True)] * 400]
    assert factors(batch, CorrectionOptions("mask", "sequence", 0.5, 2.0)) == [[0.0] * 400]
    assert factors(batch, CorrectionOptions("mask", "sequence_mean", 0.5, 2.0))[0] == pytest.approx(
        [math.exp(0.01)] * 400
    )


def test_a_ratio_below_float32_is_no_rejection() -> None:
    """A factor of 0 stands for tokens without any loss, and a long sequence's ratio may be e^-400."""
    (kept,) = factors([[(-0.02, True)] * 20_000], CorrectionOptions(kind="truncate", level="sequence"))
    assert 0 < min(kept) <= max(kept) < 1e-30
    (rejected,) = factors([[(-0.02, True)] * 9], CorrectionOptions(kind="truncate", rejection_floor=0.99))
    assert set(rejected) == {0.0}


@pytest.mark.parametrize("kind", ["none", "truncate", "mask"])
def test_a_nan_is_a_nan_in_what_depends_on_it(kind: str) -> None:
    how = CorrectionOptions(kind=kind, level="sequence_mean", rejection_cap=1.5)
    broken, whole = factors([[(math.nan, True), (0.0, True)], [(0.1, True)]], how)
    assert all(math.isnan(factor) for factor in broken)
    assert whole[0] > 0


@given(batch=sequences, how=options)
def test_what_is_beyond_a_bound_is_what_a_mask_leaves_out(batch: list[Tokens], how: CorrectionOptions) -> None:
    tokens = [token for sequence in batch for token in sequence]
    got = share_beyond(
        torch.tensor([x for x, _ in tokens], dtype=torch.float64),
        torch.tensor([trained for _, trained in tokens], dtype=torch.bool),
        torch.tensor([0, *map(len, batch)]).cumsum(0),
        how,
    )
    masked = [c for row in plain(batch, CorrectionOptions("mask", how.level, how.floor, how.cap)) for c in row]
    kept = [factor for factor, (_, trained) in zip(masked, tokens, strict=True) if trained]
    assert got == pytest.approx(kept.count(0.0) / max(1, len(kept)))
