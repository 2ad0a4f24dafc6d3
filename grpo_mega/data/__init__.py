"""Where prompts come from: tokenizer, generated and stored problems, splits, and an order that can be resumed."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, replace
from functools import partial

from grpo_mega.config.rules.data import check_data
from grpo_mega.config.schema import Config
from grpo_mega.data.huggingface import HuggingFaceTokenizer
from grpo_mega.data.jsonl import Unreachable, load_jsonl
from grpo_mega.data.overlap import check_held_out, check_repeated, check_split
from grpo_mega.data.source import PromptSource, shuffled_epochs
from grpo_mega.data.stops import stop_ids
from grpo_mega.data.supervised import SupervisedRows, rows_of_file
from grpo_mega.data.tasks.chain_sum import SPLIT_SEED, ChainSum
from grpo_mega.data.tokenizer import CharTokenizer, Tokenizer
from grpo_mega.types import Prompt, Row


@dataclass(frozen=True)
class Data:
    """Everything a run reads."""

    tokenizer: Tokenizer
    train: PromptSource
    validation: list[Prompt]
    test: list[Prompt]
    chain_sum: ChainSum | None
    """The generated task, for base documents and demonstrations; None for problems from files."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a completion."""
    supervised: SupervisedRows | None = None
    """What supervised steps learn before reinforcement learning; None without them."""
    warnings: tuple[str, ...] = ()
    """What is odd about the data, and to be said before training."""


def build_data(config: Config, unreachable: Unreachable = lambda answer: None) -> Data:
    """The data of a run; `unreachable` says why an answer could never be rewarded (`reward/truths.py`).

    Raises ValueError or FileNotFoundError that names the field, or the file and line.
    """
    check_data(config)
    data = config.data
    if data.task == "chain_sum":
        found = _chain_sum(config, CharTokenizer())
    else:
        chars = data.tokenizer == "chars"
        tokenizer = (
            CharTokenizer() if chars else HuggingFaceTokenizer(data.tokenizer, data.template, data.parse_special)
        )
        found = _jsonl(config, tokenizer, unreachable)
    ends = stop_ids(config, found.tokenizer)
    endless = "rollout.stop=[]: no token ends a completion, so every one is cut off, which no format allows"
    warnings = [*found.warnings] if ends else [*found.warnings, endless]
    supervised = found.supervised
    if config.sft.path:
        supervised = rows_of_file(config, found.tokenizer, ends, warnings.append)
    return replace(found, stop_ids=ends, supervised=supervised, warnings=tuple(warnings))


def _chain_sum(config: Config, tokenizer: CharTokenizer) -> Data:
    data, seed = config.data, config.run.seed
    task = ChainSum(tokenizer, data.min_terms, data.max_terms, data.validation_size, data.test_size)
    # Every length is among the held-out problems, so these stand for the endless training stream too.
    _check_room(task.validation + task.test, config.model.context)
    longest, traces = task.longest_document(), config.sft.steps and not config.sft.path
    if (config.base.train or traces) and longest > config.model.context:
        raise ValueError(
            f"sums of data.max_terms={data.max_terms} have worked documents of up to {longest} tokens; model.context "
            f"is {config.model.context}: raise model.context or lower data.max_terms"
        )
    identity = (
        f"chain_sum seed={seed} terms={data.min_terms}..{data.max_terms} "
        f"held_out={data.validation_size}+{data.test_size}"
    )
    train = PromptSource(lambda k: task.problem(seed, k), identity)
    supervised = SupervisedRows(partial(_traces, config, task), config.sft.steps, identity) if traces else None
    return Data(tokenizer, train, task.validation, task.test, task, supervised=supervised)


def _traces(config: Config, task: ChainSum, step: int) -> list[Row]:
    """Worked problems in the answer format."""
    traces = task.sft_traces(config.run.seed, step, config.sft.batch_size)
    return [Row(prompt + completion, ((len(prompt), len(prompt) + len(completion)),)) for prompt, completion in traces]


def _jsonl(config: Config, tokenizer: Tokenizer, unreachable: Unreachable) -> Data:
    data, seed = config.data, config.run.seed
    assert data.train_path, "refused by check_data"
    assert data.test_path, "refused by check_data"
    warnings: list[str] = []
    paths = data.train_path, data.test_path
    problems, test = (load_jsonl(path, tokenizer, unreachable, warnings.append) for path in paths)
    if data.validation_size >= len(problems):
        raise ValueError(
            f"data.validation_size is {data.validation_size}, but {data.train_path} holds {len(problems)} problems and "
            f"at least one must be left for training: lower it to {len(problems) - 1} or less"
        )
    _check_room(problems + test, config.model.context)
    shuffled = random.Random(SPLIT_SEED).sample(problems, len(problems))
    cut = len(problems) - data.validation_size
    train, validation = shuffled[:cut], shuffled[cut:]
    for prompts, path in ((problems, data.train_path), (test, data.test_path)):
        warnings += check_repeated(prompts, path)
    warnings += check_split(train, validation, data.train_path)
    warnings += check_held_out(problems, test, *paths)
    digest = hashlib.sha256(repr(problems).encode()).hexdigest()[:16]
    identity = f"jsonl sha256={digest} seed={seed} held_out={data.validation_size}"
    source = PromptSource(shuffled_epochs(train, seed), identity)
    return Data(tokenizer, source, validation, test, None, warnings=tuple(warnings))


def _check_room(prompts: list[Prompt], context: int) -> None:
    """Refuses a prompt that leaves no room for a single new token."""
    for prompt in prompts:
        if len(prompt.token_ids) >= context:
            raise ValueError(
                f"prompt {prompt.id!r} has {len(prompt.token_ids)} tokens and model.context is {context}: no room "
                "for a completion. Raise model.context or drop the prompt"
            )
