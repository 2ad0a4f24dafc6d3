"""Files of a model directory other than weights: the tokenizer's files, and the tokens that begin and end a text.

Without tokenizer files, transformers silently creates an empty tokenizer for the directory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_mega.config.schema import ModelConfig
from grpo_mega.errors import InputError
from grpo_mega.models.families.config_json import sliding_window

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "tokenizer.model", "vocab.json", "merges.txt", "tiktoken.model", "tokenization_kimi.py",
    "tokenization_moonshot.py",
)  # fmt: skip
"""Files that a tokenizer in a Hugging Face directory may consist of; every directory has only some of them."""


@dataclass(frozen=True)
class Companions:
    """Content of a model directory other than weights.

    Attributes:
        config: Fields of config.json that do not follow from the architecture.
        files: {name: content} of further files.
        origin: The config.json of the directory that the model started from; empty when there is none.
    """

    config: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    origin: dict[str, Any] = field(default_factory=dict)


def companions(tokenizer: str, init_from: str | None, model: ModelConfig, stop_ids: Sequence[int]) -> Companions:
    """Companions of a run's model: its tokenizer (chars has no files), and its origin's generation and context fields.

    `tokenizer` and `init_from` are the settings of these names, `stop_ids` are the stop tokens of training.

    Raises:
        InputError: The tokenizer's files are missing.
    """
    texts = None if tokenizer == "chars" else Path(tokenizer)
    source = Path(init_from) if init_from else None
    # The model's folder comes first: its generation settings belong to the weights, whereas a separate tokenizer's
    # folder may be of another model.
    folders = [folder for folder in (source, texts) if folder]
    origin: dict[str, dict[str, Any]] = {}
    for name in (CONFIG, GENERATION):
        first = next((folder / name for folder in folders if (folder / name).is_file()), None)
        origin[name] = json.loads(first.read_text(encoding="utf-8")) if first else {}
    kept = {name: origin[CONFIG][name] for name in ("bos_token_id", "pad_token_id") if name in origin[CONFIG]}
    made_for = origin[CONFIG].get("max_position_embeddings") or 0
    # A Mistral model that is trained within its window has model.window=null, and may be exported as a Llama, which has
    # no window.
    window = sliding_window(origin[CONFIG]) if model.window is None else None
    # The context that the origin was made for is kept even if training used a shorter one. Where the configuration
    # leaves out the origin's window, both are the same function only within that window, which then limits the context.
    longest = max(model.context, min(made_for, window or made_for))
    there = [texts / name for name in TOKENIZER_FILES if (texts / name).is_file()] if texts else []
    if texts and not there:
        what = f"it has none of {', '.join(TOKENIZER_FILES)}"
        raise InputError(f"data.tokenizer={texts}", what, "put them back")
    files = {file.name: file.read_bytes() for file in there}
    generation = kept | origin[GENERATION] | _ends(stop_ids, origin[GENERATION])
    if generation:
        files[GENERATION] = json.dumps(generation, indent=1).encode()
    described = kept | _ends(stop_ids, origin[CONFIG]) | {"max_position_embeddings": longest}
    return Companions(described, files, origin[CONFIG] if source and (source / CONFIG).is_file() else {})


def _ends(stop_ids: Sequence[int], origin: dict[str, Any]) -> dict[str, Any]:
    """End-of-text settings, from the model's origin if it names the same tokens; empty for none."""
    named = origin.get("eos_token_id")
    if not stop_ids:
        return {}
    # The same tokens in the origin's own form (a number or a list) keep the exported file unchanged.
    if {*stop_ids} == {*(named if isinstance(named, list) else [named])}:
        return {"eos_token_id": named}
    return {"eos_token_id": stop_ids[0] if len(stop_ids) == 1 else [*stop_ids]}
