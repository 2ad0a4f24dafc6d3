"""The trainer leaves the device and comes back: nothing of it stays there, and training cannot tell the difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks

JOB = Path(__file__).with_name("offload_job.py")
CASES = ["plain", "bf16", "ep2 bf16 distributed", "pp2 tied"]
FURTHER = ["adapters", "distributed", "bf16 distributed", "ep2"]
TRAINED = {f"{role} {kind}" for role in ("policy", "critic") for kind in ("weights", "optimizer", "gradients")}
KINDS = TRAINED | {"reference weights", "reward model weights", "reward model gradients", "reward model optimizer"}
RANKS = (0, 1)
# Bytes of positions and other vectors of three models' last micro-batches; one activation, [78, 64] of fp32, is more.
SMALL = 18_000


def what_ranks_find(folder: Path, *names: str) -> list[dict[str, Any]]:
    """What each rank finds in each case."""
    outputs = run_ranks(JOB, len(RANKS), [str(folder), *names], timeout=600)
    return [json.loads(output.strip().splitlines()[-1]) for output in outputs]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return what_ranks_find(tmp_path_factory.mktemp("offload"), *CASES, "no room", "fixed")


@pytest.fixture(scope="module")
def found_further(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return what_ranks_find(tmp_path_factory.mktemp("offload"), *FURTHER)


@pytest.fixture
def case(request: pytest.FixtureRequest, name: str, rank: int) -> dict[str, Any]:
    return request.getfixturevalue("found" if name in CASES else "found_further")[rank][name]


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.long) for name in FURTHER)])
class TestLayout:
    """Three updates of policy and critic, the reference refreshed in between; all leave and come back after each."""

    def test_training_is_the_same_bit_for_bit(self, case: dict[str, Any]) -> None:
        assert case["same"]
        assert case["compared"] > 30

    def test_nothing_stays(self, case: dict[str, Any]) -> None:
        held = sum(case["held"][0].values())
        assert held > 50 * SMALL
        assert held <= case["taken"]
        assert 0 <= case["left"] < SMALL

    def test_what_is_held_is_counted_by_kind(self, case: dict[str, Any]) -> None:
        assert len(case["held"]) == 3
        assert all(held == case["held"][0] for held in case["held"])
        assert case["held"][0].keys() == KINDS
        nothing = {kind for kind, size in case["held"][0].items() if not size}
        assert nothing == {"reward model gradients", "reward model optimizer"}
        assert case["away"] == [dict.fromkeys(KINDS, 0)] * 3

    def test_weights_may_leave_last(self, case: dict[str, Any]) -> None:
        kept = case["held"][2]["policy weights"]
        assert case["staying"] == dict.fromkeys(KINDS, 0) | {"policy weights": kept}
        assert case["leaving"][2] == sum(case["held"][2].values()) - kept
        assert case["readable"]
        assert "the critic is offloaded" in case["others refused between"][0]
        assert "the reward model is offloaded" in case["others refused between"][1]
        assert all("Offloaded: " in said for said in case["refused between"])


def test_bytes_by_kind_are_those_of_the_precisions(found: list[dict]) -> None:
    for name, dense_bytes in (("plain", 4), ("bf16", 2)):
        held = found[0][name]["held"][0]
        assert held["reference weights"] == held["policy weights"]
        for role in ("policy", "critic"):
            parameters = held[f"{role} weights"] / dense_bytes
            assert held[f"{role} gradients"] == 4 * parameters
            assert held[f"{role} optimizer"] == (8 if name == "plain" else 12) * parameters


@pytest.mark.long
def test_ranks_share_the_state_of_a_distributed_optimizer(found: list[dict], found_further: list[dict]) -> None:
    for name, whole in (("distributed", "plain"), ("bf16 distributed", "bf16")):
        shards = sum(rank[name]["held"][0]["policy optimizer"] for rank in found_further)
        assert shards == pytest.approx(found[0][whole]["held"][0]["policy optimizer"], rel=0.01)


@pytest.mark.parametrize("rank", RANKS)
def test_every_use_of_an_offloaded_policy_is_a_clear_error(found: list[dict], rank: int) -> None:
    refused = found[rank]["ep2 bf16 distributed"]["refused"]
    assert len(refused) == 15
    assert refused.pop("offload") == "Offloaded: the trainer is offloaded already: call onload before offload"
    assert refused["save"].startswith("CannotSave")
    for name, said in refused.items():
        role = next((role for role in ("critic", "reward model") if name.startswith(role)), "policy")
        assert f"Offloaded: the {role} is offloaded while the engine has the device, and its " in said, name
        assert "Call TrainerMemory.onload first" in said, name


@pytest.mark.parametrize("rank", RANKS)
def test_coming_back_to_a_device_without_room_can_be_tried_again(found: list[dict], rank: int) -> None:
    case = found[rank]["no room"]
    assert "can't allocate memory" in case["refused"]
    assert case["partly"] > 0
    assert case["used"].startswith("Offloaded")
    assert case["same"]
    assert case["again"] == "RuntimeError: the trainer is on the device: call offload before onload"


@pytest.mark.parametrize("rank", RANKS)
def test_memory_that_cannot_be_freed_is_refused_and_nothing_is_offloaded(found: list[dict], rank: int) -> None:
    case = found[rank]["fixed"]
    assert f"{case['bytes']:,} bytes of the policy weights cannot be freed" in case["refused"]
    assert case["same"]
    assert case["kept"]
    assert case["twice"] == "ValueError: models of the same role: policy, policy; give each its own role"
