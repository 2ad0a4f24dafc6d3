"""Model cards name the stage that trained the model last, its paper, and its teacher."""

from __future__ import annotations

import pytest
import yaml
from composed import composed

from grpo_mega.convert.card import Facts, card
from grpo_mega.platform import start

start()  # before megatron.core is imported

from grpo_mega.stages.distill import Distill  # noqa: E402
from grpo_mega.stages.grpo import GRPO  # noqa: E402
from grpo_mega.stages.ppo import PPO  # noqa: E402

GRPO_WORDS = ("experiment=tiny",)
PPO_WORDS = ("experiment=tiny", "algorithm=ppo")
DISTILL_WORDS = ("experiment=tiny_distill", "distill.teacher=runs/big")
PAPERS = {"2402.03300", "1707.06347", "2306.08543"}


def of(words: tuple[str, ...], stage: str | None = None, steps: int = 3) -> str:
    return card(composed(*words), Facts("policy", stage, steps, "Glm4MoeForCausalLM", 1000, "fp32", {}, "python"))


def settings(text: str) -> dict[str, object]:
    return yaml.safe_load(text.split("```yaml")[1].split("```")[0])


@pytest.mark.parametrize(
    ("words", "stage", "paper", "own"),
    [
        (GRPO_WORDS, GRPO, "2402.03300", set()),
        (PPO_WORDS, PPO, "1707.06347", {"critic"}),
        (DISTILL_WORDS, Distill, "2306.08543", {"distill"}),
    ],
)
def test_the_last_stage_is_named_with_its_paper_and_its_settings(
    words: tuple[str, ...], stage: type[GRPO], paper: str, own: set[str]
) -> None:
    text = of(words)
    assert f"the policy after 3 steps of {stage.name}, trained" in text
    [algorithm] = (line for line in text.splitlines() if line.startswith("| algorithm |"))
    assert [one for one in PAPERS if one in algorithm] == [paper]
    assert ("GRPO" in algorithm) == (stage is GRPO)
    assert settings(text).keys() & {"critic", "distill"} == own
    assert ("reinforcement-learning" in text) == (stage is not Distill)


def test_a_teacher_is_named_and_rewards_that_teach_nothing_are_measured() -> None:
    text = of(DISTILL_WORDS)
    assert "| teacher | `runs/big` |" in text
    assert "(only measured)" in text
    assert "(only measured)" not in of((*DISTILL_WORDS, "distill.reward_coef=1", "algorithm.group_size=4"))
    assert "| teacher |" not in of(PPO_WORDS)


@pytest.mark.parametrize("words", [GRPO_WORDS, PPO_WORDS, DISTILL_WORDS])
@pytest.mark.parametrize("stage", ["sft", "pretrain"])
def test_an_earlier_stage_is_named_without_the_algorithm_of_the_last(words: tuple[str, ...], stage: str) -> None:
    text = of(words, stage)
    assert f"the policy after 3 steps of {stage}, trained" in text
    assert "| algorithm |" not in text
    assert not settings(text).keys() & {"algorithm", "reward", "critic", "distill"}


@pytest.mark.parametrize("words", [GRPO_WORDS, PPO_WORDS])
def test_a_last_stage_without_steps_has_trained_nothing(words: tuple[str, ...]) -> None:
    text = of((*words, "sft.steps=9"), steps=0)
    assert "the policy after supervised steps, trained" in text
    assert "| algorithm |" not in text
