"""Stop tokens, which end a completion: those of the configuration, or else the model's own."""

from __future__ import annotations

import json
from pathlib import Path

from grpo_mega.config.schema import Config
from grpo_mega.data.tokenizer import Tokenizer

GENERATION_CONFIG = "generation_config.json"


def stop_ids(config: Config, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Token ids of `rollout.stop`.

    null means the tokenizer's end of text and what generation_config.json of `data.tokenizer` and
    `run.init_from` names (`eos_token_id`: where a chat model ends its turn).

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
            file = Path(folder or ".") / GENERATION_CONFIG
            if folder and file.is_file():
                sources |= dict.fromkeys(_ends(file), str(file))
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


_HOW_TO_SET = """name them, with quotes for the shell: "rollout.stop=['<|im_end|>']\""""


def _ends(file: Path) -> list[int]:
    """`eos_token_id` of a generation_config.json (a number or several) as a list; empty when it is missing."""
    try:
        ends = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{file} holds no JSON object: {error}; {_HOW_TO_SET}") from error
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if not all(type(i) is int for i in ends):
        raise ValueError(f"{file}: eos_token_id is {ends!r}, not a number or several; {_HOW_TO_SET}")
    return ends
