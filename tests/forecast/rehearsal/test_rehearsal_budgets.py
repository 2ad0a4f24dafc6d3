"""Every experiment for GPUs, every pipeline stage, balanced and skewed: budgets of memory and launches, few waits.

And what no experiment has by itself: a critic, and stages that take turns with several pieces of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from ranks import REPOSITORY
from rehearsing import needs_environment, rehearse


@dataclass(frozen=True)
class Budget:
    """The most that any rank of an experiment may take.

    Attributes:
        reserved: GB that torch's allocator holds, in any phase: passes, updates, the engine's turn, checkpoints.
        launches: Of the second pass forward and backward: in the first, kernels are compiled, and some tried.
    """

    reserved: float
    launches: int


AT_THE_END = 4
"""Waits at the end of a pass: whether gradients are finite, sums for metrics, loads of experts, log-probs."""


BUDGETS = {
    "r1zero_671b": Budget(reserved=65.8, launches=18490),
    "gsm8k_0.5b": Budget(reserved=31.2, launches=1700),
    "r1zero_671b_h200": Budget(reserved=84.1, launches=18490),
    "gsm8k_0.5b algorithm=ppo": Budget(reserved=40.8, launches=1710),
    "r1_671b_reward_model": Budget(reserved=47.4, launches=15710),
    "r1_671b_all reward.model.path=runs/preferred": Budget(reserved=53.7, launches=17060),
    "r1_671b": Budget(reserved=60.3, launches=17070),
    "deepseek_v3_lora": Budget(reserved=36.5, launches=28660),
    "qwen3_30b_a3b": Budget(reserved=53.9, launches=7830),
    "qwen3_30b_a3b_lora": Budget(reserved=17.1, launches=20490),
    "moonlight_16b": Budget(reserved=52.5, launches=6310),
    "deepseekmath_7b": Budget(reserved=45.3, launches=2970),
    "deepseekmath_7b layout.pp=2 layout.vpp=3 model.layers=6": Budget(reserved=11.6, launches=1680),
    "countdown_1b": Budget(reserved=45.0, launches=1920),
    "r1_distilled_1_5b sft.path=rows.jsonl": Budget(reserved=28.1, launches=2750),
}
"""What was measured, with room for a twentieth; two that take long come first for each of two processes."""
NOT_REHEARSED = {
    "own_model": "whoever uses it names the model",
    "r1_671b_sft": "r1_671b's model and layout; a supervised update computes what one of the policy does",
}


def test_every_experiment_for_gpus_has_a_budget() -> None:
    files = {path.stem for path in (REPOSITORY / "configs" / "experiment").glob("*.yaml")}
    named = {*(words.split()[0] for words in BUDGETS), *NOT_REHEARSED}
    assert named <= files
    without = {name for name in files - named if _without_gpus(name)}
    assert files == named | without


def _without_gpus(experiment: str) -> bool:
    text = (REPOSITORY / "configs" / "experiment" / f"{experiment}.yaml").read_text()
    return "cluster" not in text and ("tiny" in text)


@pytest.mark.long
@needs_environment
@pytest.mark.parametrize("words", BUDGETS)
def test_every_stage_keeps_to_its_budget(words: str, tmp_path: Path) -> None:
    budget = BUDGETS[words]
    measured = rehearse(tmp_path, 0, *words.split())
    stages = measured["planned"]["stages"]
    for rank in measured["ranks"]:
        which = f"{words}, rank {rank['rank']}, {rank['sequences']}"
        [second] = [phase for phase in rank["phases"] if phase["name"] == "gradients, update 2"]
        reserved = max(phase["peak_reserved"] for phase in rank["phases"]) / 1e9
        assert reserved <= budget.reserved, f"{which}: {reserved:.1f} GB"
        assert second["launches"] <= budget.launches, which
        # As many micro-batches as there are stages; each waits twice at most, and once in every layer of experts.
        assert second["waits"] <= len(stages) * (2 + stages[rank["stage"]]["moe_layers"]) + AT_THE_END, which


GATHERED = ("TENSOR_MODEL_PARALLEL_GROUP", "all-gather")


@pytest.mark.long
@needs_environment
def test_a_rank_computes_in_8_bits_and_sends_fewer_bytes(tmp_path: Path) -> None:
    """Quantised anew for each micro-batch: more launches, and no more memory from step to step."""
    words = ["moonlight_16b", "--rank", "0", "algorithm.correction=truncate"]
    [before], [after] = (rehearse(tmp_path, 0, *words, *more)["ranks"] for more in ([], ["layout.fp8=true"]))
    for name in ("gradients, update 2", "old log-probs"):
        plain, eight = (next(phase for phase in rank["phases"] if phase["name"] == name) for rank in (before, after))
        gathered, fewer = (
            sum(row["bytes"] for row in phase["collectives"] if (row["group"], row["collective"]) == GATHERED)
            for phase in (plain, eight)
        )
        assert eight["launches"] > plain["launches"] * 1.1
        assert fewer < 0.7 * gathered
        assert eight["waits"] == plain["waits"]
        assert abs(eight["allocated"] - plain["allocated"]) < 0.1e9
