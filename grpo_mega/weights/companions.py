"""What a model directory holds beside weights: the tokenizer's files, and which tokens begin and end a text.

Without them transformers makes up an empty tokenizer for the directory, and says nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_mega.config.schema import Config

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "tokenizer.model", "vocab.json", "merges.txt",
)  # fmt: skip
"""What tokenizers of Hugging Face directories are made of; each has some of them."""


@dataclass(frozen=True)
class Companions:
    """Beside the weights.

    Attributes:
        config: Fields of config.json that the architecture does not give.
        files: {name: content} of further files.
    """

    config: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)


def companions(config: Config, stop_ids: Sequence[int]) -> Companions:
    """Of a run's model: its tokenizer (chars has no files), and what its origin says of generation and context.

    `stop_ids` end a completion, as they did in training.
    """
    folders = [Path(folder) for folder in (config.data.tokenizer, config.run.init_from) if folder]
    origin = {name: _first(folders[::-1], name) for name in (CONFIG, GENERATION)}
    ends = {"eos_token_id": stop_ids[0] if len(stop_ids) == 1 else list(stop_ids)} if stop_ids else {}
    kept = {name: origin[CONFIG][name] for name in ("bos_token_id", "pad_token_id") if name in origin[CONFIG]}
    longest = max(config.model.context, origin[CONFIG].get("max_position_embeddings", 0))
    files = {name: (folders[0] / name).read_bytes() for name in TOKENIZER_FILES if (folders[0] / name).is_file()}
    generation = kept | origin[GENERATION] | ends
    if generation:
        files[GENERATION] = json.dumps(generation, indent=1).encode()
    return Companions(kept | ends | {"max_position_embeddings": longest}, files)


def _first(folders: Sequence[Path], name: str) -> dict[str, Any]:
    """The JSON object in the first of the folders that has this file; empty when none has."""
    for folder in folders:
        if (folder / name).is_file():
            return json.loads((folder / name).read_text(encoding="utf-8"))
    return {}
