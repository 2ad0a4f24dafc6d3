"""Random number generators go on where a checkpoint was written, or start anew under another layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import run_ranks


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[float]]]:
    """What each of two ranks drew."""
    job = Path(__file__).with_name("random_state_job.py")
    outputs = run_ranks(job, 2, [str(tmp_path_factory.mktemp("random"))])
    return [json.loads(output.strip().splitlines()[-1]) for output in outputs]


def test_every_generator_goes_on_exactly_where_it_was_saved(seen):
    for rank in seen:
        assert len(rank["begun"]) >= 10, "python, numpy, torch and Megatron's trackers"
        assert rank["loaded"] == rank["went on"]
        for one, other in (("begun", "went on"), ("went on", "spoiled")):
            assert all(a != b for a, b in zip(rank[one], rank[other], strict=True))


def test_ranks_draw_different_numbers_except_where_megatron_wants_the_same(seen):
    first, second = (rank["loaded"] for rank in seen)
    assert all(a != b for a, b in zip(first[:6], second[:6], strict=True))
    assert first[6:] != second[6:]


def test_under_another_layout_they_depend_on_seed_and_step_alone(seen):
    for rank in seen:
        assert rank["elsewhere"] == rank["elsewhere again"]
        assert rank["elsewhere"][:6] != rank["loaded"][:6]
        assert all(a != b for a, b in zip(rank["elsewhere"], rank["elsewhere later"], strict=True))
