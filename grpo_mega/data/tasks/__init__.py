"""Tasks with generated problems: chain sums, tiny programs, a mixture of both, products, and numbers to guess."""

from __future__ import annotations

from typing import Protocol

from grpo_mega.config.schema import DataConfig
from grpo_mega.data.tasks.chain_sum import SPLIT_SEED, ChainSum
from grpo_mega.data.tasks.tiny_code import TinyCode
from grpo_mega.data.tasks.tiny_guess import TinyGuess
from grpo_mega.data.tasks.tiny_product import TinyProduct
from grpo_mega.data.tokenizer import CharTokenizer, character_tokenizer
from grpo_mega.errors import InputError
from grpo_mega.types import Prompt

TRIES = 20
"""Problems drawn for each one needed, before a task counts as exhausted."""


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


class TinyMixture:
    """Chain sums and tiny programs, told apart by `Prompt.task`, for rewards with terms by task.

    Half each of training problems, held-out problems and base documents.
    """

    lesson = "worked arithmetic and programs, until it can do both"

    def __init__(
        self, tokenizer: CharTokenizer, min_terms: int, max_terms: int, validation_size: int, test_size: int
    ) -> None:
        """Draws the held-out problems; an odd number has one more sum. Raises InputError as the two tasks do."""
        self.tokenizer = tokenizer
        try:
            self.sums = ChainSum(tokenizer, min_terms, max_terms, -(-validation_size // 2), -(-test_size // 2))
            self.programs = TinyCode(tokenizer, validation_size // 2, test_size // 2)
        except InputError as error:
            sizes = f"data.validation_size={validation_size} and data.test_size={test_size}"
            where = f"{error.where} (tiny_mixture gives each of its two tasks half of {sizes})"
            raise InputError(where, error.what, error.fix) from error
        self.validation = self.sums.validation + self.programs.validation
        self.test = self.sums.test + self.programs.test

    def problem(self, seed: int, k: int) -> Prompt:
        """Training problem k of a run with this seed."""
        # Alternating, so that any stretch of problems has half of each, as a function of the counter alone.
        return (self.programs if k % 2 else self.sums).problem(seed, k // 2)

    def documents(self, seed: int, step: int, n: int, tagged: float, direct: float) -> list[list[int]]:
        """The n base documents of one training step, with `tagged` and `direct` as in each task."""
        sums = self.sums.documents(seed, step, -(-n // 2), tagged, direct)
        return sums + self.programs.documents(seed, step, n // 2, tagged, direct)

    def longest_document(self) -> int:
        """Number of tokens of the longest possible base document."""
        return max(self.sums.longest_document(), self.programs.longest_document())

    def working_prompt(self, prompt: Prompt) -> Prompt:
        """The prompt followed by the beginning of its untagged working, for the competence gate's continuation."""
        return self._task_of(prompt).working_prompt(prompt)

    def is_worked_out(self, prompt: Prompt, text: str) -> bool:
        """Whether the continuation of a `working_prompt` reaches the right answer."""
        return self._task_of(prompt).is_worked_out(prompt, text)

    def _task_of(self, prompt: Prompt) -> ChainSum | TinyCode:
        return self.sums if prompt.task == "chain_sum" else self.programs


def chain_sum(data: DataConfig) -> ChainSum:
    """The task of a run with `data.task=chain_sum`, the same problems in every call.

    Raises:
        InputError: Too many problems are to be held out; names the field.
    """
    sizes = (data.min_terms, data.max_terms, data.validation_size, data.test_size)
    return ChainSum(character_tokenizer(data), *sizes, data.languages)


def generated_task(data: DataConfig) -> GeneratedTask:
    """The task of a run whose `data.task` is not jsonl, the same problems in every call.

    Raises:
        InputError: Too many problems are to be held out; names the field.
    """
    if data.task == "chain_sum":
        return chain_sum(data)
    if data.task == "tiny_code":
        return TinyCode(character_tokenizer(data), data.validation_size, data.test_size)
    if data.task == "tiny_guess":
        return TinyGuess(character_tokenizer(data), data.validation_size, data.test_size)
    if data.task == "tiny_product":
        return TinyProduct(character_tokenizer(data), data.validation_size, data.test_size)
    return TinyMixture(character_tokenizer(data), data.min_terms, data.max_terms, data.validation_size, data.test_size)


def training_set(task: GeneratedTask, size: int) -> dict[str, list[Prompt]]:
    """{task: different training problems} of a run with `data.train_size=size`, the same for every seed of a run.

    A mixture has half of each of its tasks; an odd number has one more sum.

    Raises:
        InputError: A task has fewer problems.
    """
    if isinstance(task, TinyMixture):
        sets = [_different(task.sums, -(-size // 2)), _different(task.programs, size // 2)]
    else:
        sets = [_different(task, size)]
    return {problems[0].task: problems for problems in sets}


def _different(task: GeneratedTask, size: int) -> list[Prompt]:
    """The first `size` different training problems of a task."""
    distinct: dict[str, Prompt] = {}
    for k in range(TRIES * size):
        # Not the run's seed: every run with the same size trains on the same problems.
        prompt = task.problem(SPLIT_SEED, k)
        distinct.setdefault(prompt.text, prompt)
        if len(distinct) == size:
            return [*distinct.values()]
    name = next(iter(distinct.values())).task
    raise InputError(
        "data.train_size",
        f"{size} training problems of {name} are needed, but {TRIES * size} draws gave only {len(distinct)} "
        "different ones",
        "lower it, or set it to null for problems without end",
    )
