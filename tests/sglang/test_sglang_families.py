"""A real SGLang engine computes what is trained, for families that no other test here runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from train_jobs import Job, numbers

FAMILIES = {
    "GLM-4.5": ["model=tiny_moe", "model.qk_norm=true", "model.qkv_bias=true", "model.rope_fraction=0.5"],
    "Gemma 3": [
        "model=tiny_dense", "model.family=gemma3_text", "model.qk_norm=true", "model.tie_embeddings=true",
        "model.window=6", "model.full_every=2", "model.window_rope_base=100", "model.query_pre_attn_scalar=20",
    ],
}  # fmt: skip
RUN = [
    "experiment=tiny_sglang", "base=none", "layout=single", "data.validation_size=8", "data.test_size=16",
    "algorithm.prompts_per_step=4", "algorithm.group_size=4", "rollout.max_new_tokens=12", "run.tensorboard=false",
    "run.steps=2", "run.eval_every=0", "run.save_every=0", "rollout.sglang.verify_every=1",
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_of_engine_and_trainer_agree_before_and_after_an_update(family: str, tmp_path: Path) -> None:
    settings = [*RUN, *FAMILIES[family], "run.name=run"]
    ended = Job(tmp_path, settings, ranks=1, environment={"PYTHONPATH": os.environ["PYTHONPATH"]}).finish()
    assert ended.code == 0, ended.stderr
    compared = [step["mismatch/max_abs"] for step in numbers(tmp_path / "runs" / "run")]
    assert len(compared) == 2
    assert max(compared) < 1e-4
