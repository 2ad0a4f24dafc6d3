"""Prompt template and lengths for a Hugging Face model, when the user configured none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from grpo_mega.config.from_folder import chat_template
from grpo_mega.config.load import config_dir
from grpo_mega.data.huggingface import CHAT
from grpo_mega.models.families.reading import model_settings
from grpo_mega.types import Prompt

QUESTIONS = {
    "code": "{prompt}\nAnswer with Python code in one block that begins with ```python and ends with ```.",
    "last_number": "{prompt}\nPlease reason step by step, and end with the answer, a number.",
}
"""Option of configs/reward -> question that asks an instruction-tuned model for an answer in the form that it reads."""
IN_TAGS = (
    "{prompt}\nFirst think within <think> </think> tags, then give the answer within <answer> </answer> tags: "
    "<think> your reasoning </think><answer> your answer </answer>"
)
"""The same for all other options but boxed, whose question is that of configs/data/asks_for_box.yaml."""


def asked(model: Path, reward: str) -> tuple[str, str, str]:
    """Format of the prompt for which the reward can read the answer: option of configs/data, template, question."""
    chat = bool(chat_template(model))
    if ":" in reward:
        return "jsonl", CHAT if chat else "{prompt}", "{prompt}"
    if chat and reward == "boxed":
        return "jsonl", CHAT, str(_option("asks_for_box").question)
    if chat:
        return "jsonl", CHAT, QUESTIONS.get(reward, IN_TAGS)
    option = "boxed" if reward == "boxed" else "r1zero"
    return option, str(_option(option).template), "{prompt}"


def _option(name: str) -> Any:
    return OmegaConf.load(config_dir() / "data" / f"{name}.yaml")


def lengths(problems: Sequence[Prompt], model: Path, answer_tokens: int) -> tuple[int, int]:
    """Tokens of the longest prompt, and of the longest sequence (prompt and answer), capped at the model's context.

    Raises:
        ValueError: Some prompts leave no room for an answer.
    """
    sizes = [len(problem.token_ids) for problem in problems]
    longest = max(sizes)
    context = model_settings(model, longest + answer_tokens)["context"]
    if context <= longest:
        raise ValueError(
            f"{sum(size >= context for size in sizes)} of {len(sizes)} problems leave no room for an answer: the "
            f"longest prompt has {longest} tokens, and {model} was made for {context}; remove the long ones"
        )
    return longest, context
