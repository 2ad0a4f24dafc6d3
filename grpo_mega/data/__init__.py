"""Where prompts come from: tokenizer, generated and stored problems, splits, and an order that can be resumed."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

from grpo_mega.config.schema import Config
from grpo_mega.data.chain_sum import SPLIT_SEED, ChainSum
from grpo_mega.data.huggingface import HuggingFaceTokenizer
from grpo_mega.data.jsonl import load_jsonl
from grpo_mega.data.source import PromptSource, shuffled_epochs
from grpo_mega.data.tokenizer import CharTokenizer, Tokenizer
from grpo_mega.types import Prompt


@dataclass(frozen=True)
class Data:
    """Everything a run reads."""

    tokenizer: Tokenizer
    train: PromptSource
    validation: list[Prompt]
    test: list[Prompt]
    chain_sum: ChainSum | None
    """The generated task, for base documents and demonstrations; None for problems from files."""


def build_data(config: Config) -> Data:
    """The data of a run. Raises ValueError or FileNotFoundError that names the field, or the file and line."""
    if config.data.task == "chain_sum":
        return _chain_sum(config, CharTokenizer())
    if config.data.task == "jsonl":
        name = config.data.tokenizer
        tokenizer = CharTokenizer() if name == "chars" else HuggingFaceTokenizer(name, config.data.template)
        return _jsonl(config, tokenizer)
    raise ValueError(f"data.task is {config.data.task!r}; it must be chain_sum or jsonl")


def _chain_sum(config: Config, tokenizer: CharTokenizer) -> Data:
    data, seed = config.data, config.run.seed
    task = ChainSum(tokenizer, data.min_terms, data.max_terms, data.validation_size, data.test_size)
    # Every length is among the held-out problems, so these stand for the endless training stream too.
    _check_room(task.validation + task.test, config.model.context)
    longest = task.longest_document()
    if (config.base.train or config.sft.steps) and longest > config.model.context:
        raise ValueError(
            f"sums of data.max_terms={data.max_terms} have worked documents of up to {longest} tokens; model.context "
            f"is {config.model.context}: raise model.context or lower data.max_terms"
        )
    identity = (
        f"chain_sum seed={seed} terms={data.min_terms}..{data.max_terms} "
        f"held_out={data.validation_size}+{data.test_size}"
    )
    train = PromptSource(lambda k: task.problem(seed, k), identity)
    return Data(tokenizer, train, task.validation, task.test, task)


def _jsonl(config: Config, tokenizer: Tokenizer) -> Data:
    data, seed = config.data, config.run.seed
    if data.train_path is None or data.test_path is None:
        raise ValueError("data.task=jsonl needs both data.train_path and data.test_path")
    problems, test = (load_jsonl(path, tokenizer) for path in (data.train_path, data.test_path))
    if not 0 <= data.validation_size < len(problems):
        raise ValueError(
            f"data.validation_size is {data.validation_size}, but {data.train_path} holds {len(problems)} problems and "
            f"at least one must be left for training: set it to 0..{len(problems) - 1}"
        )
    _check_room(problems + test, config.model.context)
    shuffled = random.Random(SPLIT_SEED).sample(problems, len(problems))
    cut = len(problems) - data.validation_size
    digest = hashlib.sha256(repr(problems).encode()).hexdigest()[:16]
    identity = f"jsonl sha256={digest} seed={seed} held_out={data.validation_size}"
    return Data(tokenizer, PromptSource(shuffled_epochs(shuffled[:cut], seed), identity), shuffled[cut:], test, None)


def _check_room(prompts: list[Prompt], context: int) -> None:
    """Refuses a prompt that leaves no room for a single new token."""
    for prompt in prompts:
        if len(prompt.token_ids) >= context:
            raise ValueError(
                f"prompt {prompt.id!r} has {len(prompt.token_ids)} tokens and model.context is {context}: no room "
                "for a completion. Raise model.context or drop the prompt"
            )
