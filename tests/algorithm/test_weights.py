"""Token weights: naive loops agree, and no way of cutting or ordering the batch changes the loss."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mega.algorithm.weights import token_weights

LENGTH = 7
AGGREGATIONS = ("sequence_mean", "token_mean", "constant")
batches = st.lists(st.lists(st.booleans(), max_size=9), min_size=1, max_size=8)


def pack(masks: list[list[bool]]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([0, *map(len, masks)])
    return torch.tensor([m for mask in masks for m in mask], dtype=torch.bool), lengths.cumsum(0)


def losses_like(masks: list[list[bool]]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(masks))
    return [torch.randn(len(mask), generator=generator, dtype=torch.float64) for mask in masks]


def naive_loss(masks: list[list[bool]], losses: list[torch.Tensor], aggregation: str) -> float:
    """The papers' formulas, one sequence after the other."""
    trained = [loss[torch.tensor(mask)].tolist() for loss, mask in zip(losses, masks, strict=True) if any(mask)]
    if not trained:
        return 0.0
    if aggregation == "sequence_mean":
        return sum(sum(s) / len(s) for s in trained) / len(trained)
    if aggregation == "token_mean":
        return sum(map(sum, trained)) / sum(map(len, trained))
    return sum(sum(s) / LENGTH for s in trained) / len(trained)


@given(masks=batches, aggregation=st.sampled_from(AGGREGATIONS))
@settings(max_examples=80)
def test_weighted_sum_equals_the_formulas(masks: list[list[bool]], aggregation: str) -> None:
    mask, cu_seqlens = pack(masks)
    losses = losses_like(masks)
    weight = token_weights(mask, cu_seqlens, aggregation, LENGTH)
    assert weight.dtype == torch.float32
    assert (weight[~mask] == 0).all()
    assert (weight[mask] > 0).all()
    loss = (weight.double() * torch.cat(losses)).sum().item()
    assert loss == pytest.approx(naive_loss(masks, losses, aggregation), abs=1e-6)


@given(masks=batches, aggregation=st.sampled_from(AGGREGATIONS), data=st.data())
@settings(max_examples=60)
def test_order_and_split_change_nothing(masks: list[list[bool]], aggregation: str, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(masks))))
    weight = token_weights(*pack(masks), aggregation, LENGTH).split([len(m) for m in masks])
    permuted = token_weights(*pack([masks[i] for i in order]), aggregation, LENGTH)
    assert torch.equal(permuted, torch.cat([weight[i] for i in order]))

    cut = data.draw(st.integers(0, len(masks)))
    losses = losses_like(masks)
    parts = [sum((weight[i].double() * losses[i]).sum().item() for i in part) for part in (order[:cut], order[cut:])]
    assert sum(parts) == pytest.approx(naive_loss(masks, losses, aggregation), abs=1e-6)


@given(masks=batches, aggregation=st.sampled_from(AGGREGATIONS), data=st.data())
@settings(max_examples=80)
def test_sequences_elsewhere_count_as_if_they_were_here(
    masks: list[list[bool]], aggregation: str, data: st.DataObject
) -> None:
    kept = data.draw(st.lists(st.booleans(), min_size=len(masks), max_size=len(masks)))
    whole = token_weights(*pack(masks), aggregation, LENGTH).split([len(m) for m in masks])
    part = pack([mask for mask, here in zip(masks, kept, strict=True) if here])
    expected = [torch.zeros(0), *(weight for weight, here in zip(whole, kept, strict=True) if here)]
    assert torch.equal(token_weights(*part, aggregation, LENGTH, [sum(mask) for mask in masks]), torch.cat(expected))


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("sequence_mean", [0, 1 / 2, 0, 0, 1 / 6, 1 / 6, 1 / 6]),
        ("token_mean", [0, 1 / 4, 0, 0, 1 / 4, 1 / 4, 1 / 4]),
        ("constant", [0, 1 / 14, 0, 0, 1 / 14, 1 / 14, 1 / 14]),
    ],
)
def test_a_sequence_without_trained_tokens_counts_for_nothing(aggregation: str, expected: list[float]) -> None:
    mask, cu_seqlens = pack([[False, True], [False, False], [True, True, True]])
    torch.testing.assert_close(token_weights(mask, cu_seqlens, aggregation, LENGTH), torch.tensor(expected))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("masks", [[[False, False], [False]], [[], []], []])
def test_nothing_to_train_is_all_zeros(aggregation: str, masks: list[list[bool]]) -> None:
    mask, cu_seqlens = pack(masks)
    assert torch.equal(token_weights(mask, cu_seqlens, aggregation, LENGTH), torch.zeros(len(mask)))


@pytest.mark.parametrize("cu_seqlens", [[0, 2], [1, 3], [0, 4], [0, 5, 3], [0], []])
def test_lengths_that_do_not_cut_the_mask_are_refused(cu_seqlens: list[int]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to the 3 tokens"):
        token_weights(torch.ones(3, dtype=torch.bool), torch.tensor(cu_seqlens), "token_mean", LENGTH)


def test_other_bad_input_is_refused() -> None:
    mask, cu_seqlens = pack([[True, False]])
    with pytest.raises(ValueError, match="'mean'; use sequence_mean, token_mean or constant"):
        token_weights(mask, cu_seqlens, "mean", LENGTH)
    with pytest.raises(ValueError, match="constant_length is 0"):
        token_weights(mask, cu_seqlens, "constant", 0)
    with pytest.raises(ValueError, match="bool vector"):
        token_weights(mask.float(), cu_seqlens, "token_mean", LENGTH)
