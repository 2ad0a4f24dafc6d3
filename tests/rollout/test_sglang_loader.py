"""What a rank of an SGLang engine reads of a model directory; `tests/sglang` has it in real engines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grpo_mega.config.load import compose_config
from grpo_mega.platform import start

start()  # before megatron.core is imported

from grpo_mega.rollout.sglang.arguments import expected_weights, model_config  # noqa: E402
from grpo_mega.rollout.sglang.loader import stored  # noqa: E402
from grpo_mega.weights.directory import Writer  # noqa: E402

VOCAB = 26


@pytest.mark.parametrize(
    "model", [["model=tiny_qwen3_moe"], ["model=tiny_mla_moe", "model.qk_norm=true"]], ids=["Qwen3-MoE", "DeepSeek-V3"]
)
@pytest.mark.parametrize("experts", [None, range(0), range(0, 2), range(2, 4)])
def test_a_rank_reads_its_own_experts_and_all_that_is_no_expert(
    tmp_path: Path, model: list[str], experts: range | None
) -> None:
    """As the trainer counts them, which knows them by its own table of names."""
    config = compose_config(["experiment=tiny_sglang", "layout=single", *model])
    weights = {
        name: torch.randn(spec.shape).to(spec.dtype)
        for name, spec in expected_weights(config.model, False, VOCAB, None).items()
    }
    writer = Writer(tmp_path / "model", model_config(config.model, False, VOCAB))
    writer.begin()
    names = sorted(weights)
    for begin in range(0, len(names), 7):
        writer.add([(name, weights[name]) for name in names[begin : begin + 7]])
    writer.finish()
    read = [*stored(tmp_path / "model", experts)]
    wanted = expected_weights(config.model, False, VOCAB, experts)
    assert sorted(name for name, _ in read) == sorted(wanted)
    assert len(wanted) < len(weights) or experts is None
    assert all(torch.equal(tensor, weights[name]) for name, tensor in read)
