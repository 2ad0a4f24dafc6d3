"""The layout that is proposed fits, no faster one does, and what fits nowhere is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from composed import composed
from ranks import results, run_ranks

from grpo_mega import platform

platform.start()

from grpo_mega.config.load import to_yaml  # noqa: E402
from grpo_mega.forecast.planning.choice import NEAR  # noqa: E402

SEVEN, SIXTEEN = ["experiment=deepseekmath_7b"], ["experiment=moonlight_16b", "model.layers=9"]
CASES = {
    "one machine": SEVEN,
    "larger GPUs": [*SEVEN, "cluster=h200", "cluster.nodes=2", "layout.micro_batch_tokens=32768"],
    "experts": SIXTEEN,
    "short completions": [*SEVEN, "model.context=1280", "layout.recompute=none", "layout.micro_batch_tokens=16384"],
    "too small": [*SEVEN, "cluster.gpus_per_node=1"],
    "unknown": [*SEVEN, "cluster=any"],
}


@pytest.fixture(scope="module")
def proposals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    trained = tmp_path_factory.mktemp("reward_model")
    own = ["experiment=tiny_reward_model", "layout=single", "model.layers=4", "pairs.path=pairs.jsonl"]
    (trained / "config.yaml").write_text(to_yaml(composed(*own)))
    scored = ["experiment=tiny_dense", "cluster=h100", "cluster.gpus_per_node=2", f"reward.model.path={trained}"]
    cases = json.dumps({**CASES, "scored by another model": scored})
    return results(run_ranks(Path(__file__).with_name("propose_job.py"), 1, [cases]))


@pytest.mark.parametrize(
    ("case", "gpus"), [("one machine", 8), ("larger GPUs", 16), ("experts", 8), ("short completions", 8)]
)
def test_it_fits_and_what_is_clearly_faster_does_not(proposals: dict[str, Any], case: str, gpus: int) -> None:
    found = proposals[case]
    assert found["gpus"] == gpus
    assert found["fits"] == [True, True]
    assert not any(found["faster"])


def test_it_is_not_simply_the_fastest(proposals: dict[str, Any]) -> None:
    for case in ("one machine", "experts"):
        searched = proposals[case]["search"]
        assert searched["faster"]["bytes"] > searched["limit"]
        assert searched["faster"]["seconds"] < searched["layouts"][0]["seconds"]
    assert proposals["larger GPUs"]["search"]["faster"] is None


@pytest.mark.parametrize("case", ["one machine", "larger GPUs", "experts", "scored by another model"])
def test_what_is_counted_in_a_search_is_what_is_built(proposals: dict[str, Any], case: str) -> None:
    found = proposals[case]
    assert found["counted"] == [pytest.approx(found["built"], rel=2e-3)]
    assert found["seconds"] == sorted(found["seconds"])


@pytest.mark.parametrize("case", ["one machine", "larger GPUs", "experts"])
def test_a_search_begins_with_what_is_proposed_and_says_what_the_others_lose(
    proposals: dict[str, Any], case: str
) -> None:
    found = proposals[case]
    searched, (first, *others) = found["search"], found["search"]["layouts"]
    assert searched["settings"] == found["settings"]
    assert {name: found["layout"][name] for name in first["layout"]} == first["layout"]
    assert first["more"] == {}
    assert [layout["seconds"] for layout in others] == sorted(layout["seconds"] for layout in others)
    for layout in others:
        assert first["bytes"] <= searched["limit"] >= layout["bytes"]
        lost, slower = sum(layout["more"].values()), layout["seconds"] - first["seconds"]
        assert slower >= -NEAR * first["seconds"]
        assert lost > slower or lost == pytest.approx(max(slower, 0))


@pytest.mark.parametrize("case", ["one machine", "larger GPUs", "experts", "short completions"])
def test_of_layouts_that_are_nearly_as_fast_the_simplest_is_taken(proposals: dict[str, Any], case: str) -> None:
    layouts = proposals[case]["search"]["layouts"]
    fastest = min(layout["seconds"] for layout in layouts)
    near = [each["layout"] for each in layouts if each["seconds"] <= (1 + NEAR) * fastest]
    parts = [
        (layout["recompute"] == "full", layout["tp"] * layout["pp"] * layout["cp"], layout["cp"] * layout["pp"])
        for layout in near
    ]
    assert parts[0] == min(parts)


def test_micro_batches_are_as_large_as_fits(proposals: dict[str, Any]) -> None:
    assert proposals["short completions"]["layout"]["micro_batch_tokens"] == 8192
    assert proposals["short completions"]["layout"]["cp"] == 1, "short sequences are not split"


def test_larger_gpus_allow_a_faster_layout(proposals: dict[str, Any]) -> None:
    small, large = (proposals[case]["layout"] for case in ("one machine", "larger GPUs"))
    assert large["pp"] * large["tp"] * large["cp"] < small["pp"] * small["tp"] * small["cp"]


def test_a_model_that_is_too_large_is_refused_with_its_size(proposals: dict[str, Any]) -> None:
    assert proposals["too small"]["error"].startswith("1 GPUs: no layout fits: the smallest takes about ")
    assert "GPUs (cluster.nodes=" in proposals["too small"]["error"]


def test_without_the_memory_of_a_gpu_nothing_is_proposed(proposals: dict[str, Any]) -> None:
    assert "cluster.gpu_memory_mib=null: " in proposals["unknown"]["error"]
