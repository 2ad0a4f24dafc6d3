"""Which steps are compared with their plan, and the words."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from grpo_mega.forecast.planning.prediction import LOG, Prediction, comparison_line

COMPARED: dict[str, Any] = {
    "gpu": "h100",
    "gpus": 512,
    "steps": [2, 3],
    "seconds": {"generate": [1022.44, 1311.0], "update": [50.26, 61.04], "values": [2.0, None], "reward": [None, 3.0]},
    "memory": [58.1e9, 57.25e9],
}


def test_the_line_has_what_was_measured_and_what_was_planned() -> None:
    assert comparison_line(COMPARED) == (
        "seconds of steps 2 and 3 as measured (as planned for 512 H100): generate 1,311 (1,022), update 61 (50.3), "
        "values none (2); memory 57.2 GB (58.1)"
    )
    assert comparison_line(COMPARED | {"memory": [58.1e9, None]}).endswith("values none (2)")


def metrics(*phases: str) -> dict[str, float]:
    return {f"time/{phase}": 1.0 for phase in (*phases, "step")} | {"rollout/length_mean": 9.0}


def test_a_plan_that_cannot_be_made_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Here without a config.yaml. Compared are two steps after the first, which sample, learn and evaluate nothing."""
    prediction = Prediction(tmp_path, 8, 45, 10.0, allocator=False)
    said: list[str] = []
    prediction.say = said.append
    prediction.stage("sft", 0, 9)
    whole = metrics("generate", "update")
    for step in (1, 2, 3):
        prediction.step(step, whole)  # of a stage that is not the last
    prediction.stage("", 0, 9)
    for step, of_step in enumerate([whole, metrics("generate"), metrics("generate", "update", "evaluate"), whole], 1):
        prediction.step(step, of_step)
    assert not (tmp_path / LOG).exists(), "one whole step is not enough"
    prediction.step(5, whole)
    with caplog.at_level(logging.WARNING):
        assert prediction.finish({}) == {}
    assert "config.yaml" in (tmp_path / LOG).read_text()
    assert f"see {tmp_path / LOG}" in caplog.text
    (tmp_path / LOG).unlink()
    prediction.step(6, whole)
    prediction.step(7, whole)
    assert prediction.finish({}) == {}
    assert not (tmp_path / LOG).exists(), "nothing is tried twice"
    assert not said
