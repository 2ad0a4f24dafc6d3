"""Agents on real SGLang: those with OpenAI's own client, whose turns go on after what the engine still holds, and one
whose chat begins anew."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import results, run_ranks

JOB = Path(__file__).with_name("grpo_job.py")


@pytest.mark.parametrize("agent", ["with_openai", "with_openai_async", "forgetful"])
def test_an_agent_is_trained(agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (JOB.parent, JOB.parents[1] / "environment"):
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    settings = [
        f"environment.path=agents:{agent}",
        "environment.open=''",
        "environment.close='='",
        "reward.terms=[{name:own,kind:environment}]",
        "rollout.max_new_tokens=32",
        "model.context=128",
        "run.steps=2",
        "run.eval_every=0",
    ]
    run = results(run_ranks(JOB, 1, [str(tmp_path), "sglang", *settings], timeout=600))
    assert [step["step"] for step in run["metrics"]] == [1, 2]
    for step in run["metrics"]:
        assert step["environment/calls"] > 0.5, "turns after which the agent asked for another"
        if agent == "forgetful":
            assert step["environment/restarts"] > 0.25, "pieces, whose prefixes are short"
        else:
            assert step["reward/own"] >= 1
            assert step["rollout/cached"] > 0.25
        assert step["mismatch/max_abs"] < 1e-4
    assert not [warning for warning in run["warnings"] if "agent" in warning]
