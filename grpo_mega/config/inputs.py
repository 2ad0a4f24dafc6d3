"""What a run reads from disk, by the field that names it; it can be looked at long before anything is read."""

from __future__ import annotations

import os

from grpo_mega.config.schema import Config


def inputs(config: Config) -> dict[str, str]:
    """{field: path} of everything that must be there."""
    named = {"data.train_path": config.data.train_path, "data.test_path": config.data.test_path}
    named |= {"sft.path": config.sft.path}
    named |= {} if config.base.train else {"run.init_from": config.run.init_from}
    named |= {} if config.data.tokenizer == "chars" else {"data.tokenizer": config.data.tokenizer}
    return {name: place for name, place in named.items() if place}


def check_inputs(config: Config) -> None:
    """Looks for all of it.

    Raises:
        FileNotFoundError: Something is not there; one line for each.
    """
    missing = [f"{name}={place} does not exist" for name, place in inputs(config).items() if not os.path.exists(place)]
    if len(missing) > 1:
        missing.insert(0, "what the run reads is missing:")
    if missing:
        raise FileNotFoundError("\n  ".join(missing))
