"""Interleaved stages, weights on their way to an engine, a checkpoint: a rank of DeepSeekMath has all of them."""

from __future__ import annotations

from typing import Any

import pytest
from rehearsing import needs_environment, rehearse

from grpo_mega.config.load import compose_config
from grpo_mega.models.transfer import STAGED

pytestmark = [pytest.mark.long, needs_environment]
SETTINGS = ("layout.pp=2", "layout.vpp=3", "model.layers=6")
MICROS, VPP, ROWS = 2, 3, 8_192
"""Micro-batches, chunks of layers on a rank, and rows of a micro-batch, which two tensor parallel ranks share."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return rehearse(tmp_path_factory.mktemp("turns"), 0, "deepseekmath_7b", "--rank", "0", *SETTINGS)


def phase(measured: dict[str, Any], name: str) -> dict[str, Any]:
    [found] = [phase for phase in measured["ranks"][0]["phases"] if phase["name"] == name]
    return found


def moved(of_phase: dict[str, Any], kind: str) -> int:
    return sum(row["bytes"] for row in of_phase["collectives"] if row["collective"] == kind)


def test_chunks_of_layers_take_turns(measured: dict[str, Any]) -> None:
    """The first stage gets hidden states for two of its three chunks, gradients for all, and no shapes."""
    model = compose_config(["experiment=deepseekmath_7b"]).model
    message = ROWS * model.hidden * 2
    assert moved(phase(measured, "gradients, update 1"), "receive") == MICROS * (VPP - 1 + VPP) * message
    assert moved(phase(measured, "reference log-probs"), "receive") == MICROS * (VPP - 1) * message


def test_activations_in_flight_are_what_the_planner_counts(measured: dict[str, Any]) -> None:
    assert "the planner is off" not in measured["text"]


def test_an_engine_gets_all_weights_in_buckets(measured: dict[str, Any]) -> None:
    """Whoever sends, every byte of the model passes once. The embedding is a bucket of its own, larger than others: it
    is there whole, and in one piece for the engine, as the planner counts."""
    config = compose_config(["experiment=deepseekmath_7b"])
    sent, before = phase(measured, "weights to the engine"), phase(measured, "all but weights leave")
    assert moved(sent, "broadcast") == pytest.approx(2 * measured["planned"]["parameters"], rel=0.001)
    embedding = 2 * config.model.hidden * (config.model.vocab_size or 0)
    assert embedding > config.rollout.sglang.bucket_bytes
    planned = measured["planned"]["engine"]["hand-over"]["buckets"]
    assert sent["peak_allocated"] - before["allocated"] == pytest.approx(planned, rel=0.01) == 2 * embedding
    assert sent["allocated"] == pytest.approx(before["allocated"], abs=1e7)


def test_a_checkpoint_takes_what_its_rank_writes(measured: dict[str, Any]) -> None:
    """A rank copies its own part of Adam's state, half of 12 bytes a parameter where there are two replicas, and in the
    first one the weights, to the host, through pinned memory that it keeps."""
    saved, before = phase(measured, "checkpoint, policy"), phase(measured, "trainer returns")
    trained = measured["planned"]["stages"][0]["trained_dense"]
    stage = measured["planned"]["stages"][0]
    a_parameter = 12 / stage["replicas"] + 2
    assert a_parameter * trained < saved["host"] - before["host"] < (a_parameter + 1) * trained + STAGED
    assert saved["waits"] <= saved["to_host_bytes"] / STAGED + 10
    assert saved["to_host_pageable"] < 0.01 * saved["to_host_bytes"] + 2 * trained  # Megatron copies the weights itself
    assert saved["to_host_bytes"] == pytest.approx(a_parameter * trained, rel=0.01)
    assert saved["allocated"] == pytest.approx(before["allocated"], abs=0.1e9)
    assert phase(measured, "checkpoint, reference")["to_host_bytes"] == pytest.approx(2 * trained, rel=0.01)
