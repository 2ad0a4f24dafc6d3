"""Overlapped gathering leaves parameters in parts after an update, and nobody ever reads such a part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks

CASES = [pytest.param(case, marks=pytest.mark.long) for case in ("tied-dp2", "separate-ep2")]
WAYS = ("whole", "next_gradients", "scored", "generated", "reference", "saved", "loaded", "new_optimizer")


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The outcome on each of two ranks, of the cases that selected tests are about."""
    job = Path(__file__).with_name("overlap_job.py")
    cases = {item.callspec.params["case"] for item in request.session.items if item.path == request.path}
    outputs = run_ranks(job, 2, [str(tmp_path_factory.mktemp("overlap")), *sorted(cases)])
    return [json.loads(output.strip().splitlines()[-1]) for output in outputs]


@pytest.mark.parametrize("case", CASES)
def test_an_update_leaves_parameters_in_parts_until_they_are_gathered(seen, case):
    for rank in seen:
        stale = rank[case]["stale"]
        assert stale["waited"] == stale["gathered"] == []
        assert "chunks.0.decoder.layers.0.self_attention.linear_qkv.weight" in stale["overlapped"]
        assert rank[case]["buckets"] > 3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_every_way_to_read_them_right_after_an_update_finds_what_it_would_without_overlap(seen, case, way):
    for rank in seen:
        assert rank[case]["unequal"][way] == []
