"""Engines of two ranks that keep half of the experts each, and get no others, whichever way.

With one KV cache for both, whose heads they share, and with one for each, under data parallel attention, where two such
engines share a machine and its ports; Qwen3-MoE, and DeepSeek-V3 as its presets run it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import results, run_ranks

JOB = Path(__file__).with_name("expert_parallel_job.py")


DATA_PARALLEL_ATTENTION = [f"+rollout.sglang.arguments.{word}" for word in ("enable_dp_attention=true", "dp_size=2")]
# SGLang's rotary embedding for CPUs knows latent attention with YaRN only.
DEEPSEEK = ["model=tiny_mla_moe", "model.qk_norm=true", "model.yarn.factor=2", "model.yarn.original_context=64"]


@pytest.fixture(
    scope="module",
    params=[
        (2, []),
        (4, DATA_PARALLEL_ATTENTION),
        (2, [*DEEPSEEK, *DATA_PARALLEL_ATTENTION]),
        (2, [*DATA_PARALLEL_ATTENTION, "rollout.sglang.transport=network"]),
    ],
    ids=["one cache", "two engines with data parallel attention", "DeepSeek-V3", "over the network"],
)
def asked(request: pytest.FixtureRequest) -> tuple[int, list[str]]:
    """Ranks and settings of the run."""
    return request.param


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, asked: tuple[int, list[str]]) -> list[dict]:
    """What each rank saw."""
    ranks, settings = asked
    return results(run_ranks(JOB, ranks, [str(tmp_path_factory.mktemp("experts")), *settings], timeout=900))


def test_the_engine_computes_with_the_experts_of_both_ranks(found: list[dict]) -> None:
    for rank in found:
        assert rank["distance"] < 1e-4
        assert rank["right"] == rank["completed"] == "nothing"


def test_each_rank_is_handed_half_of_the_experts_and_none_travels(found: list[dict], asked: tuple) -> None:
    """Of 4 experts in 2 layers, 3 matrices of 64 x 96 each; under EP2 a rank has its half already."""
    half = 2 * 2 * 3 * 64 * 96 * 4
    attention, norms, router = (4 + 2 + 2 + 4) * 24 * 96, 2 * 24 + 2 * 96, 4 * 96
    if "model=tiny_mla_moe" in asked[1]:  # latents of 32 and 16, a key of 8 for all heads, 4 heads of 16 + 8 and 16
        queries, keys_and_values = 32 * 96 + 4 * (16 + 8) * 32, (16 + 8) * 96 + 4 * (16 + 16) * 16
        attention, norms = queries + keys_and_values + 96 * 4 * 16, 32 + 16 + 2 * 96
        router += 4 + 3 * 64 * 96  # its bias, and the expert for all tokens
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


def test_all_ranks_meet_an_engine_again_that_was_started_anew(found: list[dict], asked: tuple) -> None:
    """Over the network, where each of them sends; `test_sglang_transport.py` has the other ways with one rank."""
    if "rollout.sglang.transport=network" not in asked[1]:
        pytest.skip("only over the network ranks meet their engine")
    for rank in found:
        assert "the SGLang engine of ranks 0 to 1" in rank["lost"]
        assert rank["again"] < 1e-4


def test_each_rank_reads_what_it_needs_of_a_directory(tmp_path: Path) -> None:
    """`tests/rollout` has that it reads no other experts."""
    settings = [*DATA_PARALLEL_ATTENTION, "rollout.sglang.transport=disk"]
    for rank in results(run_ranks(JOB, 2, [str(tmp_path), *settings], timeout=900)):
        assert rank["right"] == "nothing"
        assert rank["distance"] < 1e-4
