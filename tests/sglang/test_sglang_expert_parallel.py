"""Two ranks and an engine of two whose ranks keep half of the experts each, and get no others.

With one KV cache for both, whose heads they share, and with one for each, under data parallel attention.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import results, run_ranks

JOB = Path(__file__).with_name("expert_parallel_job.py")


ONE_CACHE: list[str] = []
DATA_PARALLEL_ATTENTION = [f"+rollout.sglang.arguments.{word}" for word in ("enable_dp_attention=true", "dp_size=2")]


@pytest.fixture(
    scope="module", params=[ONE_CACHE, DATA_PARALLEL_ATTENTION], ids=["one cache", "data parallel attention"]
)
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict]:
    """What each rank saw."""
    folder = str(tmp_path_factory.mktemp("experts"))
    return results(run_ranks(JOB, 2, [folder, *request.param], timeout=600))


def test_the_engine_computes_with_the_experts_of_both_ranks(found: list[dict]) -> None:
    for rank in found:
        assert rank["distance"] < 1e-4
        assert rank["right"] == rank["completed"] == "nothing"


def test_each_rank_is_handed_half_of_the_experts_and_none_travels(found: list[dict]) -> None:
    """Of 4 experts in 2 layers, 3 matrices of 64 x 96 each; under EP2 a rank has its half already."""
    half = 2 * 2 * 3 * 64 * 96 * 4
    attention, norms, router = (4 + 2 + 2 + 4) * 24 * 96, 2 * 24 + 2 * 96, 4 * 96
    others = 4 * (2 * 26 * 96 + 2 * (attention + norms + router) + 96)
    for rank in found:
        assert rank["traffic"]["bytes"] == others + half
        assert (rank["traffic"]["received_bytes"], rank["traffic"]["sent_bytes"]) == (0, others)


def test_what_one_rank_refuses_is_raised_on_both(found: list[dict]) -> None:
    for rank in found:
        assert "no tensor model.layers.1.mlp.experts.3.down_proj.weight is expected here" in rank["alien"]
        assert "1 tensors were not pushed, the first: model.layers.1.mlp.experts.3.down" in rank["incomplete"]


@pytest.mark.parametrize("what", ["outdated", "half outdated"])
def test_an_outdated_expert_or_a_copy_of_attention_that_differs_is_noticed(what: str, found: list[dict]) -> None:
    for rank in found:
        accepted, verified = rank[what]
        assert accepted == "nothing"
        assert verified.startswith("engine 0")
        assert "does not compute with the weights that it was sent" in verified
