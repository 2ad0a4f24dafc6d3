"""Mixture of chain sums and tiny programs, told apart by `Prompt.task`, for rewards with terms by task."""

from __future__ import annotations

from grpo_mega.data.tasks.chain_sum import ChainSum
from grpo_mega.data.tasks.tiny_code import TinyCode
from grpo_mega.data.tokenizer import CharTokenizer
from grpo_mega.types import Prompt


class TinyMixture:
    """Mixture of both tasks, half each of training problems, held-out problems and base documents."""

    lesson = "worked arithmetic and programs, until it can do both"

    def __init__(
        self, tokenizer: CharTokenizer, min_terms: int, max_terms: int, validation_size: int, test_size: int
    ) -> None:
        """Draws the held-out problems; an odd number has one more sum. Raises ValueError as the two tasks do."""
        self.tokenizer = tokenizer
        try:
            self.sums = ChainSum(tokenizer, min_terms, max_terms, -(-validation_size // 2), -(-test_size // 2))
            self.programs = TinyCode(tokenizer, validation_size // 2, test_size // 2)
        except ValueError as error:
            sizes = f"data.validation_size={validation_size} and data.test_size={test_size}"
            raise ValueError(f"tiny_mixture gives each of its two tasks half of {sizes}: {error}") from error
        self.validation = self.sums.validation + self.programs.validation
        self.test = self.sums.test + self.programs.test

    def problem(self, seed: int, k: int) -> Prompt:
        """Training problem k of a run with this seed."""
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
