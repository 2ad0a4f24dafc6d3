"""Training data: tokenizer, generated and stored problems, splits, and a resumable order of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from grpo_mega.config.rules.data import check_data
from grpo_mega.config.schema import GENERATED_TASKS, Config, DataConfig
from grpo_mega.data.examples import Examples, pairs_of_files
from grpo_mega.data.huggingface import HuggingFaceTokenizer
from grpo_mega.data.labelled_steps import labelled_completions_of_files
from grpo_mega.data.model_defaults import stop_ids, unheeded_end
from grpo_mega.data.problems import Problem, Unreachable
from grpo_mega.data.prompt_order import FrontierSource, PromptSource, stream
from grpo_mega.data.stored import Stored, read_once, read_stored
from grpo_mega.data.supervised import SupervisedRows, rows_of_file
from grpo_mega.data.tasks import GeneratedTask, chain_sum, generated_task, training_set
from grpo_mega.data.tasks.chain_sum import ChainSum
from grpo_mega.data.tokenizer import Tokenizer, character_tokenizer
from grpo_mega.errors import InputError
from grpo_mega.types import Prompt, Row


@dataclass(frozen=True)
class Data:
    """Data of a run: tokenizer, training prompts, held-out problems, rows of supervised steps."""

    tokenizer: Tokenizer
    train: PromptSource | FrontierSource
    validation: list[Prompt]
    test: list[Prompt]
    problems: Sequence[Prompt] = ()
    """Problems that `train` draws from in epochs, source after source; empty when new ones are generated without
    end."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a completion."""
    supervised: SupervisedRows | None = None
    """Rows of the supervised steps before reinforcement learning; None without such steps."""
    warnings: tuple[str, ...] = ()
    """Warnings about the data, to be logged before training."""


@dataclass(frozen=True)
class ExampleData:
    """Data of a run that trains a reward model."""

    tokenizer: Tokenizer
    examples: Examples[Any]
    """Pairs, or completions whose steps have labels, as `run.trains` requires."""
    warnings: tuple[str, ...] = ()
    """Warnings about the data, to be logged before training."""


def build_example_data(config: Config) -> ExampleData:
    """The data of a run that trains a reward model.

    Raises InputError or FileNotFoundError that names the field, or the file and line.
    """
    tokenizer = build_tokenizer(config.data)
    warnings: list[str] = []
    read = pairs_of_files if config.run.trains == "reward_model" else labelled_completions_of_files
    ends = stop_ids(config.rollout.stop, tokenizer, (config.data.tokenizer, config.run.init_from))
    examples = read(config.pairs, config.model.context, config.run.seed, tokenizer, ends, warnings.append)
    return ExampleData(tokenizer, examples, tuple(warnings))


def build_data(
    config: Config,
    unreachable: Unreachable = lambda answer: None,
    keep: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Data:
    """The data of a run.

    Args:
        config: The configuration.
        unreachable: The reason why an answer could never be rewarded (`reward/scorable.py`).
        keep: Whether to cache the problems of large files for later starts; `unreachable` is needed then.
        tell: Called every few seconds while problems are read, with a message about their number.

    Raises InputError or FileNotFoundError that names the field, or the file and line.
    """
    check_data(config)
    data = config.data
    if data.task in GENERATED_TASKS:
        loaded = _generated(config)
    else:
        tokenizer = build_tokenizer(data)
        stored = read_once(
            config.run.root,
            data,
            config.reward.terms,
            lambda: read_stored(data, tokenizer, unreachable, tell),
            keep,
        )
        problems = [problem.prompt for problems in stored.train.values() for problem in problems]
        _check_room([*problems, *stored.validation, *stored.test], config.model.context)
        train = stream(stored, data, config.run.seed, config.reward.success)
        loaded = Data(tokenizer, train, stored.validation, stored.test, problems, warnings=stored.warnings)
    # Supervised rows need these tokens too: a row that ends without one would teach the policy never to stop.
    ends = stop_ids(config.rollout.stop, loaded.tokenizer, (data.tokenizer, config.run.init_from))
    endless = "rollout.stop=[]: no token ends a completion, so all are cut off, which no format reward accepts"
    warnings = [*loaded.warnings] if ends else [*loaded.warnings, endless]
    if unheeded := unheeded_end(config.rollout.stop, loaded.tokenizer, ends):
        warnings.append(unheeded)
    # Rows of a file take the place of generated ones.
    supervised = loaded.supervised
    if config.sft.path:
        supervised = rows_of_file(
            config.sft, loaded.tokenizer, ends, config.model.context, config.run.seed, warnings.append
        )
    return replace(loaded, stop_ids=ends, supervised=supervised, warnings=tuple(warnings))


def build_tokenizer(data: DataConfig) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names.

    Raises:
        FileNotFoundError: There is no such directory.
        InputError: The directory has no tokenizer that can be used.
    """
    if data.tokenizer == "chars":
        return character_tokenizer(data)
    return HuggingFaceTokenizer(
        data.tokenizer, data.template, data.parse_special, data.question, data.system, data.template_options, data.date
    )


def _generated(config: Config) -> Data:
    data, seed = config.data, config.run.seed
    task = generated_task(data)
    # The held-out problems include every length, so they also represent the endless training stream.
    _check_room(task.validation + task.test, config.model.context)
    longest, traces = task.longest_document(), config.sft.steps and not config.sft.path
    if (config.base.train or traces) and longest > config.model.context:
        what, lower = f"data.task={data.task} has", ""
        if data.task == "chain_sum":
            what, lower = f"sums of data.max_terms={data.max_terms} have", " or lower data.max_terms"
        raise InputError(
            f"model.context={config.model.context}",
            f"{what} worked documents of up to {longest} tokens",
            f"raise it to {longest}{lower}",
        )
    sums = data.task in ("chain_sum", "tiny_mixture")
    terms = f" terms={data.min_terms}..{data.max_terms}" if sums else ""
    languages = f" languages={'+'.join(data.languages)}" if data.languages else ""
    problems_are = f"{terms}{languages} held_out={data.validation_size}+{data.test_size}"
    supervised = None
    # The task is chain_sum here: config/rules/stages.py refuses generated supervised steps with any other.
    if traces:
        identity = f"{data.task} seed={seed}{problems_are}"
        supervised = SupervisedRows(
            partial(_traces, chain_sum(data), seed, config.sft.batch_size), config.sft.steps, identity
        )
    train, problems = _generated_training(data, seed, config.reward.success, task, problems_are)
    return Data(task.tokenizer, train, task.validation, task.test, problems, supervised=supervised)


def _generated_training(
    data: DataConfig, seed: int, success: str, task: GeneratedTask, problems_are: str
) -> tuple[PromptSource | FrontierSource, list[Prompt]]:
    """The source of training prompts, and the problems that it draws in epochs; none if they are endless."""
    if data.train_size is None:
        return PromptSource(lambda k: task.problem(seed, k), f"{data.task} seed={seed}{problems_are}"), []
    sets = training_set(task, data.train_size)
    train = {name: [Problem(prompt, str(prompt.asked), name) for prompt in prompts] for name, prompts in sets.items()}
    stored = Stored(train, task.validation, task.test, f"train_size={data.train_size}{problems_are}")
    problems = [prompt for prompts in sets.values() for prompt in prompts]
    return stream(stored, data, seed, success), problems


def _traces(task: ChainSum, seed: int, batch_size: int, step: int) -> list[Row]:
    """Rows of one supervised step: worked problems in the answer format."""
    traces = task.sft_traces(seed, step, batch_size)
    return [Row(prompt + completion, ((len(prompt), len(prompt) + len(completion)),)) for prompt, completion in traces]


def _check_room(prompts: list[Prompt], context: int) -> None:
    """Raises InputError for a prompt that leaves no room for a single new token in the context."""
    for prompt in prompts:
        if len(prompt.token_ids) >= context:
            raise InputError(
                f"prompt {prompt.id!r}",
                f"{len(prompt.token_ids)} tokens leave no room for a completion in model.context={context}",
                "raise model.context or drop the prompt",
            )
