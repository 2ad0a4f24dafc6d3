"""How a Hugging Face model is asked problems, and how long its answers may be, when nobody configured it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from grpo_mega.config.from_folder import has_chat_template
from grpo_mega.config.huggingface.architecture import model_settings
from grpo_mega.config.load import config_dir
from grpo_mega.data.huggingface import CHAT
from grpo_mega.types import Prompt

BOXED_QUESTION = "{prompt}\nPlease reason step by step, and put your final answer within \\boxed{}."
"""Asks a model that follows instructions for what the reward `boxed` reads (DeepSeekMath, arXiv 2402.03300)."""


def asked(model: Path, reward: str) -> tuple[str, str, str]:
    """How the policy is asked so that the reward can read its answer: option of configs/data, template, question."""
    chat = has_chat_template(model)
    if ":" in reward:
        return "jsonl", CHAT if chat else "{prompt}", "{prompt}"
    if chat and reward == "boxed":
        return "jsonl", CHAT, BOXED_QUESTION
    option = "boxed" if reward == "boxed" else "r1zero"
    return option, str(OmegaConf.load(config_dir() / "data" / f"{option}.yaml").template), "{prompt}"


def lengths(problems: Sequence[Prompt], model: Path, answer_tokens: int) -> tuple[int, int]:
    """Tokens of the longest prompt, and of the longest sequence: with an answer, if the model can read as many.

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
