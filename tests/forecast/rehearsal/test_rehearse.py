"""A rank of DeepSeekMath, and one that does not fit, on a null GPU by the command: sizes and work by arithmetic."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from limits import limit
from ranks import REPOSITORY
from rehearsing import needs_environment, rehearse

from grpo_mega.config.load import compose_config
from grpo_mega.forecast.planning.lines import of_the_trainer

pytestmark = [pytest.mark.long, needs_environment]
TOKENS, TP, DP = 16_384, 2, 4


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("math")
    found = rehearse(folder, 0, "deepseekmath_7b", "--rank", "7", "--picture", str(folder / "memory.png"))
    assert (folder / "memory.png").read_bytes().startswith(b"\x89PNG")
    return found


def phase(measured: dict[str, Any], name: str) -> dict[str, Any]:
    [found] = [phase for phase in measured["ranks"][0]["phases"] if phase["name"] == name]
    return found


def test_what_is_held_is_what_the_planner_counts(measured: dict[str, Any]) -> None:
    lines = measured["planned"]["memory"][0]
    counted = sum(lines[name] for name in ("weights", "gradients", "optimizer", "reference policy"))
    assert phase(measured, "build")["allocated"] == pytest.approx(counted, rel=0.005)
    peak = max(phase["peak_reserved"] for phase in measured["ranks"][0]["phases"])
    assert peak == pytest.approx(of_the_trainer(lines), abs=3e9)


def test_memory_is_told_by_owner_and_over_time(measured: dict[str, Any]) -> None:
    lines = measured["planned"]["memory"][0]
    gradients, away = phase(measured, "gradients, update 1"), phase(measured, "weights leave")
    assert gradients["held"]["policy weights"] == pytest.approx(lines["weights"], rel=0.01)
    assert gradients["held"]["policy optimizer"] == pytest.approx(lines["optimizer"], rel=0.01)
    assert {*away["held"].values()} == {0}
    assert max(gradients["curve"]) == pytest.approx(gradients["peak_allocated"], rel=0.001)
    assert gradients["curve"][-1] == pytest.approx(gradients["allocated"], rel=0.001)
    assert "planned for this stage" in measured["text"]


def test_products_are_those_of_the_architecture(measured: dict[str, Any]) -> None:
    model = compose_config(["experiment=deepseekmath_7b"]).model
    matrices = model.layers * (4 * model.hidden**2 + 3 * model.hidden * model.ffn_hidden)
    forward = 2 * matrices * TOKENS / TP
    scored = 8 * 1024  # of 8 sequences of 2,048 the second half
    head = 2 * model.hidden * (model.vocab_size or 0) * scored / TP
    assert phase(measured, "reference log-probs")["flops"] == pytest.approx(forward + head, rel=0.02)
    # Forward, once more for recomputation, and backward twice; the head computes its logits once.
    assert phase(measured, "gradients, update 1")["flops"] == pytest.approx(4 * forward + 3 * head, rel=0.02)


def test_gradients_are_reduced_once(measured: dict[str, Any]) -> None:
    rows = phase(measured, "gradients, update 1")["collectives"]
    [reduced] = [
        row for row in rows if (row["collective"], row["group"]) == ("reduce-scatter", "DATA_PARALLEL_GROUP_WITH_CP")
    ]
    trained = measured["planned"]["stages"][0]["trained_dense"]
    assert reduced["bytes"] == pytest.approx(4 * trained, rel=0.001)


def test_the_host_waits_for_no_copy_of_a_micro_batch(measured: dict[str, Any]) -> None:
    gradients = phase(measured, "gradients, update 2")  # in the first, torch compiles the activation
    assert gradients["waits"] == sum(gradients["places"].values()) <= 4
    assert not [place for place in gradients["places"] if "microbatch.py" in place or "packed.py" in place]
    assert gradients["to_device"] > 10
    assert gradients["to_device_pageable"] == 0


def test_weight_gradients_are_added_where_they_are_summed(measured: dict[str, Any]) -> None:
    """Not by a kernel of its own after each of 4 products of 30 layers, which would make 2,954 launches of 2,834."""
    assert phase(measured, "gradients, update 2")["launches"] < 2_954 - 4 * 30 // 2


def test_the_host_has_as_much_pinned_memory_as_leaves(measured: dict[str, Any]) -> None:
    away = [phase(measured, name) for name in ("all but weights leave", "weights leave")]
    left = sum(phase["to_host_bytes"] for phase in away)
    assert left > 24e9
    assert left <= away[-1]["pinned_peak"] < left + 0.1e9


def test_all_leaves_and_comes_back(measured: dict[str, Any]) -> None:
    built, away, back = (phase(measured, name) for name in ("build", "weights leave", "trainer returns"))
    assert away["reserved"] < 1e9
    assert back["allocated"] == pytest.approx(built["allocated"], abs=0.2e9)
    assert back["to_device_bytes"] == pytest.approx(built["allocated"] - 4 * 3.46e9, rel=0.01)  # gradients are not kept


def test_a_rank_that_does_not_fit_says_who_asked_for_the_memory(tmp_path: Any) -> None:
    arguments = ("deepseekmath_7b", "--rank", "0", "layout.recompute=none", "layout.micro_batch_tokens=65536")
    measured = rehearse(tmp_path, 1, *arguments)
    [rank] = measured["ranks"]
    assert rank["failure"]["phase"] == "gradients, update 1"
    assert rank["failure"]["message"].startswith("CUDA out of memory. Tried to allocate")
    assert ".py:" in rank["failure"]["owner"]  # of a layer's forward pass, whichever comes too late
    assert "does not fit" in measured["text"]
    assert rank["phases"][-1]["peak_reserved"] <= rank["capacity"] - rank["taken"]


def test_a_run_that_trains_a_reward_model_of_steps(tmp_path: Path) -> None:
    """Of the toy's own tokens, which no setting counts, and without a distributed optimizer: Megatron prints tensors
    when it saves that."""
    settings = ("cluster=h100", "pairs.path=steps.jsonl", "optimizer.distributed=false")
    [rank] = rehearse(tmp_path, 0, "tiny_process_reward_model", "--rank", "0", *settings)["ranks"]
    assert [phase["name"] for phase in rank["phases"]] == [
        "build", "gradients, update 1", "optimizer, update 1", "gradients, update 2", "optimizer, update 2",
        "checkpoint, reward model",
    ]  # fmt: skip
    assert rank["phases"][-1]["waits"] < 200
    assert rank["phases"][0]["held"]["reward model weights"] > 0


def test_the_toy_in_bf16(tmp_path: Path) -> None:
    """By flash attention, fused experts, and gradients that are added in place, in heads of 24 channels."""
    measured = rehearse(tmp_path, 0, "tiny", "--rank", "0", "cluster=h100", "model.dtype=bf16")
    [rank] = measured["ranks"]
    assert rank["failure"] is None
    assert [phase["name"] for phase in rank["phases"]] == [
        "build", "gradients, update 1", "optimizer, update 1", "gradients, update 2", "optimizer, update 2",
        "checkpoint, policy",
    ]  # fmt: skip
    assert rank["phases"][1]["launches"] > rank["phases"][3]["launches"] > 100, "the first compiles kernels"
    assert "fits" in measured["text"]


def test_a_package_that_is_not_here_is_an_error_of_the_settings() -> None:
    command = [sys.executable, "tools/rehearse.py", "deepseekmath_7b", "--rank", "0", "layout.attention=flash4"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=limit(300))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: layout.attention=flash4: needs flash_attn.cute, which cannot be used: ")
    assert "Traceback" not in done.stderr
