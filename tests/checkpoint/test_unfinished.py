"""Unfinished samples survive a checkpoint."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.checkpoint.unfinished import from_json, to_json
from grpo_mega.types import Prompt, Sample

TOKENS = st.lists(st.integers(0, 2**31), max_size=5).map(tuple)
LOGPROBS = st.lists(st.floats(max_value=0, allow_nan=False, allow_infinity=False), max_size=5).map(tuple)
PROMPTS = st.builds(Prompt, st.text(), TOKENS, st.text(), st.text(), st.text())
SEGMENTS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=3).map(tuple)
SAMPLES = st.builds(
    Sample,
    PROMPTS,
    st.integers(0, 64),
    TOKENS,
    LOGPROBS,
    st.sampled_from(["stop", "length"]),
    SEGMENTS,
    st.text(),
)


@given(st.lists(SAMPLES, max_size=3))
def test_samples_come_back_equal_through_json(samples):
    assert from_json(json.loads(json.dumps(to_json(samples)))) == samples
