"""Prompt template and lengths for a Hugging Face model, when the user configured none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from grpo_mega.config.from_folder import chat_template
from grpo_mega.config.huggingface.architecture import model_settings
from grpo_mega.config.load import config_dir
from grpo_mega.data.huggingface import CHAT
from grpo_mega.types import Prompt

BOXED_QUESTION = "{prompt}\nPlease reason step by step, and put your final answer within \\boxed{}."
"""Question that asks an instruction-tuned model for an answer in a box, as the reward `boxed` reads it (DeepSeekMath,
arXiv 2402.03300)."""


def asked(model: Path, reward: str) -> tuple[str, str, str]:
    """Format of the prompt for which the reward can read the answer: option of configs/data, template, question."""
    chat = bool(chat_template(model))
    if ":" in reward:
        return "jsonl", CHAT if chat else "{prompt}", "{prompt}"
    if chat and reward == "boxed":
        return "jsonl", CHAT, BOXED_QUESTION
    option = "boxed" if reward == "boxed" else "r1zero"
    return option, str(OmegaConf.load(config_dir() / "data" / f"{option}.yaml").template), "{prompt}"


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
