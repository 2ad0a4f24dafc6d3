"""How the tensors of a model are cut into buckets."""

from __future__ import annotations

import pytest
from huggingface_models import AHEAD, IN_FP8, MODELS, VOCAB
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.weights.names import entries
from grpo_mega.weights.stream import plan

FUSED = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
"""SGLang drops one of a layer that comes without the other."""


@pytest.mark.parametrize("model", [*MODELS.values(), *AHEAD.values(), IN_FP8])
@given(budget=st.integers(1, 200_000))
def test_buckets_are_within_the_budget_or_hold_what_cannot_be_cut(model, budget: int) -> None:
    found = entries(model, VOCAB)
    buckets = [*plan(found, budget)]
    assert [entry for bucket in buckets for entry in bucket] == found
    for bucket, following in zip(buckets, [*buckets[1:], None], strict=True):
        layers = [{e.name.removesuffix(tail) for e in bucket if e.name.endswith(tail)} for tail in FUSED]
        assert layers[0] <= layers[1]
        if model.mla.q_lora_rank is not None:
            assert layers[1] <= layers[0]
        size = sum(entry.bytes for entry in bucket)
        fused = len(bucket) == 2 and bucket[0].name.endswith(FUSED[0])
        one_tensor = len({entry.name for entry in bucket}) == 1  # of all experts
        assert size <= budget or one_tensor or fused
        if following:
            assert bucket[-1].name != following[0].name, "a tensor is cut"
            assert size + sum(e.bytes for e in following) > budget, "two buckets would have fitted into one"
