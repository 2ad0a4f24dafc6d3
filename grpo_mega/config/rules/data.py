"""Where prompts come from."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_mega.config.bounds import field_problems
from grpo_mega.config.rules.problems import at_most, refuse
from grpo_mega.config.schema import Config


def check_data(config: Config) -> None:
    """Raises a ConfigError that lists every rule that `config.data` breaks; no other part of `config` need be set."""
    refuse([*field_problems(config, "data."), *data_problems(config)])


def data_problems(config: Config) -> Iterator[str]:
    """What the settings of the data break."""
    data = config.data
    if data.task == "chain_sum":
        yield from at_most(config, "data.min_terms", "data.max_terms")
    for name, path in (("data.train_path", data.train_path), ("data.test_path", data.test_path)):
        if data.task == "jsonl" and not path:
            yield f"{name} is not set, and data.task=jsonl reads it; give {name}=FILE.jsonl"
        if data.task == "chain_sum" and path is not None:
            yield f"{name}={path} has no effect with data.task=chain_sum; set {name}=null, or choose data=jsonl"
    if data.task == "chain_sum" and data.tokenizer != "chars":
        yield f"data.tokenizer={data.tokenizer} has no effect with data.task=chain_sum; set it to chars"
    if data.tokenizer == "chars" and data.template != "{prompt}":
        yield (
            f"data.template={data.template!r} has no effect with data.tokenizer=chars; give data.tokenizer=FOLDER, a "
            "Hugging Face model's, or choose data=jsonl"
        )
    if data.tokenizer == "chars" and data.parse_special:
        yield "data.parse_special=true has no effect with data.tokenizer=chars; set data.parse_special=false"
    if data.template != "chat" and "{prompt}" not in data.template and data.tokenizer != "chars":
        yield f"data.template={data.template!r} has no place for the problem; write {{prompt}} there, or choose chat"
