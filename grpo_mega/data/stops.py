"""Stop tokens, which end a completion: those of the configuration, or else the model's own."""

from __future__ import annotations

import json
from pathlib import Path

from grpo_mega.config.schema import Config
from grpo_mega.data.huggingface import HuggingFaceTokenizer
from grpo_mega.data.tokenizer import Tokenizer

GENERATION_CONFIG, MODEL_CONFIG = "generation_config.json", "config.json"


def stop_ids(config: Config, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Token ids of `rollout.stop`.

    null means the tokenizer's end of text and what generation_config.json of `data.tokenizer` and `run.init_from`, or
    config.json of a folder without it, names (`eos_token_id`: where a chat model ends its turn).

    Raises:
        ValueError: A token is not in the vocabulary, or no token ends a completion.
    """
    if config.rollout.stop is not None:
        try:
            return tuple(tokenizer.token_id(token) for token in config.rollout.stop)
        except ValueError as error:
            raise ValueError(f"rollout.stop: {error}; rollout.stop=null takes the model's own") from error
    sources = {} if tokenizer.eos_id is None else {tokenizer.eos_id: "the tokenizer"}
    if config.data.tokenizer != "chars":  # the ids of chars are its own
        for folder in (config.data.tokenizer, config.run.init_from):
            files = [Path(folder or ".") / name for name in (GENERATION_CONFIG, MODEL_CONFIG)]
            if folder and (found := next((file for file in files if file.is_file()), None)):
                sources |= dict.fromkeys(_ends(found), str(found))
    for token, source in sources.items():
        if not 0 <= token < tokenizer.vocab_size:
            raise ValueError(
                f"{source} ends texts with token {token}, and the tokenizer has {tokenizer.vocab_size}; {_HOW_TO_SET}"
            )
    if not sources:
        raise ValueError(
            f"no token ends a completion: data.tokenizer={config.data.tokenizer} has no eos_token, and there is no "
            f"{GENERATION_CONFIG} that names one; {_HOW_TO_SET}"
        )
    return tuple(sorted(sources))


def unheeded_end(config: Config, tokenizer: Tokenizer, ends: tuple[int, ...]) -> str | None:
    """Warning about a chat template that ends turns with a token that ends no completion; None if there is none."""
    turn = tokenizer.end_of_turn() if isinstance(tokenizer, HuggingFaceTokenizer) else None
    if config.rollout.stop is not None or turn is None or turn in ends:
        return None
    named = [tokenizer.decode([token]) for token in (*ends, turn)]
    return (
        f"the chat template ends a turn with {named[-1]!r}, which ends no completion: answers may go on to the "
        f'length limit; set "rollout.stop={named}"'
    )


_HOW_TO_SET = """name them, with quotes for the shell: "rollout.stop=['<|im_end|>']\""""


def _ends(file: Path) -> list[int]:
    """`eos_token_id` of a folder's file (a number or several) as a list; empty when it is missing."""
    try:
        ends = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{file} holds no JSON object: {error}; {_HOW_TO_SET}") from error
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if not all(type(i) is int for i in ends):
        raise ValueError(f"{file}: eos_token_id is {ends!r}, not a number or several; {_HOW_TO_SET}")
    return ends
