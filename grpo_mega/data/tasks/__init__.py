"""Tasks with generated problems."""

from __future__ import annotations

from typing import Protocol

from grpo_mega.config.schema import DataConfig
from grpo_mega.data.tasks.chain_sum import SPLIT_SEED, ChainSum
from grpo_mega.data.tasks.tiny_code import TinyCode
from grpo_mega.data.tasks.tiny_mixture import TinyMixture
from grpo_mega.data.tokenizer import CharTokenizer, character_tokenizer
from grpo_mega.types import Prompt

TRIES = 20
"""Problems drawn for each one that is wanted, before a task counts as exhausted."""


class GeneratedTask(Protocol):
    """Interface of a generated task: problems, and documents from which a base model learns to solve them.

    Attributes:
        lesson: Training data and stopping rule of the base model.
        tokenizer: Encodes problems and documents.
        validation: Problems held out for tuning and for the base model's gate.
        test: Problems held out for the reported accuracy.
    """

    lesson: str
    tokenizer: CharTokenizer
    validation: list[Prompt]
    test: list[Prompt]

    def problem(self, seed: int, k: int) -> Prompt:
        """Training problem k of a run with this seed."""
        ...

    def documents(self, seed: int, step: int, n: int, tagged: float, direct: float) -> list[list[int]]:
        """Tokens of the n base documents of one training step.

        A share `tagged` is in the answer format; of the rest a share `direct` is the bare answer, the others are
        untagged working.
        """
        ...

    def longest_document(self) -> int:
        """Number of tokens of the longest possible base document."""
        ...

    def working_prompt(self, prompt: Prompt) -> Prompt:
        """A held-out problem with the beginning of its untagged working, for the base model's gate to continue."""
        ...

    def is_worked_out(self, prompt: Prompt, text: str) -> bool:
        """Whether the continuation of a `working_prompt` reaches the right answer."""
        ...


def chain_sum(data: DataConfig) -> ChainSum:
    """The task of a run with `data.task=chain_sum`, the same problems in every call.

    Raises:
        ValueError: Too many problems are to be held out; names the field.
    """
    sizes = (data.min_terms, data.max_terms, data.validation_size, data.test_size)
    return ChainSum(character_tokenizer(data), *sizes, data.languages)


def generated_task(data: DataConfig) -> GeneratedTask:
    """The task of a run whose `data.task` is not jsonl, the same problems in every call.

    Raises:
        ValueError: Too many problems are to be held out; names the field.
    """
    if data.task == "chain_sum":
        return chain_sum(data)
    if data.task == "tiny_code":
        return TinyCode(character_tokenizer(data), data.validation_size, data.test_size)
    return TinyMixture(character_tokenizer(data), data.min_terms, data.max_terms, data.validation_size, data.test_size)


def training_set(task: GeneratedTask, size: int) -> dict[str, list[Prompt]]:
    """{task: different training problems} of a run with `data.train_size=size`, the same for every seed of a run.

    A mixture has half of each of its tasks; an odd number has one more sum.

    Raises:
        ValueError: A task has fewer problems.
    """
    if isinstance(task, TinyMixture):
        sets = [_different(task.sums, -(-size // 2)), _different(task.programs, size // 2)]
    else:
        sets = [_different(task, size)]
    return {problems[0].task: problems for problems in sets}


def _different(task: GeneratedTask, size: int) -> list[Prompt]:
    """The first `size` different training problems of a task."""
    found: dict[str, Prompt] = {}
    for k in range(TRIES * size):
        prompt = task.problem(SPLIT_SEED, k)
        found.setdefault(prompt.text, prompt)
        if len(found) == size:
            return [*found.values()]
    name = next(iter(found.values())).task
    raise ValueError(
        f"data.train_size wants {size} training problems of {name}, but {TRIES * size} of them have only {len(found)} "
        "that differ; lower data.train_size, or set it to null for problems without end"
    )
