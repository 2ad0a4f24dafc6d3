"""Defaults that a model's folder gives: prompt format, lengths, and the tokens that end a completion."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from grpo_mega.config.from_folder import chat_template
from grpo_mega.config.load import config_dir
from grpo_mega.data.huggingface import CHAT, HuggingFaceTokenizer
from grpo_mega.data.tokenizer import Tokenizer
from grpo_mega.errors import InputError
from grpo_mega.models.families.hf_folder import model_settings
from grpo_mega.types import Prompt

QUESTIONS = {
    "code": "{prompt}\nAnswer with Python code in one block that begins with ```python and ends with ```.",
    "last_number": "{prompt}\nPlease reason step by step, and end with the answer, a number.",
}
"""Option of configs/reward -> question that asks an instruction-tuned model for an answer that the reward can read."""
IN_TAGS = (
    "{prompt}\nFirst think within <think> </think> tags, then give the answer within <answer> </answer> tags: "
    "<think> your reasoning </think><answer> your answer </answer>"
)
"""The same for all other options except boxed, whose question is in configs/data/asks_for_box.yaml."""
GENERATION_CONFIG, MODEL_CONFIG = "generation_config.json", "config.json"
_SET_STOP = """set them, with quotes for the shell: "rollout.stop=['<|im_end|>']\""""


def prompt_format(model: Path, reward: str) -> tuple[str, str, str]:
    """Format of the prompt for which the reward can read the answer: option of configs/data, template, question."""
    chat = bool(chat_template(model))
    if ":" in reward or reward == "environment":
        return "jsonl", CHAT if chat else "{prompt}", "{prompt}"
    if chat and reward == "boxed":
        return "jsonl", CHAT, str(_option("asks_for_box").question)
    if chat:
        return "jsonl", CHAT, QUESTIONS.get(reward, IN_TAGS)
    option = "boxed" if reward == "boxed" else "r1zero"
    return option, str(_option(option).template), "{prompt}"


def _option(name: str) -> Any:
    return OmegaConf.load(config_dir() / "data" / f"{name}.yaml")


def longest_lengths(problems: Sequence[Prompt], model: Path, completion_tokens: int) -> tuple[int, int]:
    """Tokens of the longest prompt, and of the longest sequence (prompt and completion), capped at the model's context.

    Raises:
        InputError: Some prompts leave no room for a completion.
    """
    sizes = [len(problem.token_ids) for problem in problems]
    longest = max(sizes)
    context = model_settings(model, longest + completion_tokens)["context"]
    if context <= longest:
        raise InputError(
            f"{sum(size >= context for size in sizes)} of {len(sizes)} problems",
            f"leave no room for a completion: the longest prompt has {longest} tokens, and {model} was trained for "
            f"{context}",
            "remove the long ones",
        )
    return longest, context


def stop_ids(stop: Sequence[str] | None, tokenizer: Tokenizer, folders: Sequence[str | None]) -> tuple[int, ...]:
    """Token ids that end a completion.

    Args:
        stop: `rollout.stop`. None means the tokenizer's end of text and the `eos_token_id` in generation_config.json of
            the folders, or in config.json of a folder without it: where a chat model ends its turn.
        tokenizer: The tokenizer.
        folders: `data.tokenizer` and `run.init_from`.

    Raises:
        InputError: A token is not in the vocabulary, or no token ends a completion.
    """
    if stop is not None:
        try:
            return tuple(tokenizer.token_id(token) for token in stop)
        except InputError as error:
            fix = f"{error.fix}, or set rollout.stop=null, which takes the model's"
            raise InputError(f"rollout.stop: {error.where}", error.what, fix) from error
    sources = {} if tokenizer.eos_id is None else {tokenizer.eos_id: "the tokenizer"}
    # The ids of chars have nothing to do with those of a model's folder.
    for folder in folders if isinstance(tokenizer, HuggingFaceTokenizer) else ():
        files = [Path(folder or ".") / name for name in (GENERATION_CONFIG, MODEL_CONFIG)]
        if folder and (file := next((file for file in files if file.is_file()), None)):
            sources |= dict.fromkeys(_ends(file), str(file))
    for token, source in sources.items():
        if not 0 <= token < tokenizer.vocab_size:
            what = f"ends texts with token {token}, and the tokenizer has {tokenizer.vocab_size} tokens"
            raise InputError(source, what, _SET_STOP)
    if not sources:
        what = f"it has no eos_token, and no {GENERATION_CONFIG} gives one: no token ends a completion"
        raise InputError(f"data.tokenizer={folders[0]}", what, _SET_STOP)
    return tuple(sorted(sources))


def unheeded_end(stop: Sequence[str] | None, tokenizer: Tokenizer, ends: tuple[int, ...]) -> str | None:
    """Warning about a chat template that ends turns with a token that ends no completion; None if there is none."""
    turn = tokenizer.end_of_turn() if isinstance(tokenizer, HuggingFaceTokenizer) else None
    if stop is not None or turn is None or turn in ends:
        return None
    named = [tokenizer.decode([token]) for token in (*ends, turn)]
    return (
        f"the chat template ends a turn with {named[-1]!r}, which ends no completion: completions may go on to the "
        f'length limit; set "rollout.stop={named}"'
    )


def _ends(file: Path) -> list[int]:
    """`eos_token_id` of a folder's file (a number or several) as a list; empty without one."""
    try:
        ends = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise InputError(str(file), f"not a JSON object: {error}", _SET_STOP) from error
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    # `type(i) is int`, as true and false are instances of int too.
    if not all(type(i) is int for i in ends):
        raise InputError(f"{file}: eos_token_id={ends!r}", "not a number or several", _SET_STOP)
    return ends
