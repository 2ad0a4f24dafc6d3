"""A teacher and a reward model, each with an architecture of its own, beside two layers of DeepSeekMath's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rehearsing import needs_environment, rehearse

from grpo_mega.config.load import compose_config, to_yaml

pytestmark = [pytest.mark.long, needs_environment]
TEACHER = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "num_attention_heads": 16,
    "num_key_value_heads": 16, "num_hidden_layers": 3, "intermediate_size": 2816, "max_position_embeddings": 4096,
    "vocab_size": 102400, "rope_theta": 1e4, "torch_dtype": "bfloat16", "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}  # fmt: skip
SCORER = ["model.layers=3", "model.hidden=1024", "model.heads=8", "model.kv_heads=8", "model.ffn_hidden=3072"]
"""The reward model, as its run was trained."""
LAYERS, TP, TOKENS = 2, 2, 2 * 2048
SCORED = TOKENS // 2
"""The second half of each sequence."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("roles")
    (folder / "teacher").mkdir()
    (folder / "teacher" / "config.json").write_text(json.dumps(TEACHER))
    (folder / "scorer").mkdir()
    (folder / "scorer" / "config.yaml").write_text(to_yaml(compose_config(["experiment=deepseekmath_7b", *SCORER])))
    roles = (f"distill.teacher={folder / 'teacher'}", "distill.reward_coef=1", f"reward.model.path={folder / 'scorer'}")
    return rehearse(
        folder, 0, "deepseekmath_7b", "--rank", "0", "--lengths", "2048,2048", f"model.layers={LAYERS}", *roles
    )


def phase(measured: dict[str, Any], name: str) -> dict[str, Any]:
    [found] = [phase for phase in measured["ranks"][0]["phases"] if phase["name"] == name]
    return found


def products(hidden: int, ffn: int, layers: int) -> float:
    """Operations of this rank's matrix products per token, forward, of layers whose keys have as many heads."""
    return 2 * layers * (4 * hidden**2 + 3 * hidden * ffn) / TP


def test_every_role_makes_its_pass(measured: dict[str, Any]) -> None:
    model = compose_config(["experiment=deepseekmath_7b"]).model
    body = TOKENS * products(model.hidden, model.ffn_hidden, LAYERS)
    head = SCORED * 2 * model.hidden * (model.vocab_size or 0) / TP
    taught = TOKENS * products(1024, 2816, 3) + SCORED * 2 * 1024 * 102_400 / TP
    assert phase(measured, "scores")["flops"] == pytest.approx(TOKENS * products(1024, 3072, 3), rel=0.01)
    assert phase(measured, "reference log-probs")["flops"] == pytest.approx(body + head, rel=0.01)
    assert phase(measured, "teacher log-probs")["flops"] == pytest.approx(taught, rel=0.01)


def test_their_weights_are_held_and_leave_as_the_planner_counts(measured: dict[str, Any]) -> None:
    built, away, back = (phase(measured, name) for name in ("build", "weights leave", "trainer returns"))
    lines = measured["planned"]["memory"][0]
    for role in ("teacher", "reward model"):
        assert built["held"][f"{role} weights"] == pytest.approx(lines[role], rel=0.01)
    assert {*away["held"].values()} == {0}
    assert back["held"] == built["held"] | {"policy gradients": back["held"]["policy gradients"]}
    assert "the planner is off: what is held" not in measured["text"]


def test_a_checkpoint_has_neither(measured: dict[str, Any]) -> None:
    saved = [phase["name"] for phase in measured["ranks"][0]["phases"] if phase["name"].startswith("checkpoint")]
    assert saved == ["checkpoint, policy", "checkpoint, reference"]
