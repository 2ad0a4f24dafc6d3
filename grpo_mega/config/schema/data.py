"""Where prompts come from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from omegaconf import MISSING

from grpo_mega.config.limits import Interval, OneOf

GENERATED_TASKS = ("chain_sum", "tiny_code", "tiny_mixture")
"""Tasks whose problems are generated; those of all others are stored."""


@dataclass
class SourceConfig:
    """Stored problems and how they are read: data.sources.NAME, where NAME is the task of its problems. A column is
    named by its path, such as reward_model.ground_truth or messages.0.content."""

    path: str | None = None
    """Training problems: a .jsonl, .json, .parquet or .arrow file, or a folder of them; null for a source that is only
    tested, or has reasoning_gym."""
    split: str = "train"
    """Which files of a folder hold training problems: those in a folder, or with a name, that begins so."""
    test_path: str | None = None
    """Held-out problems, in the same forms."""
    test_split: str = "test"
    """Which files of the folder test_path hold them."""
    weight: float | None = None
    """Share of the training prompts that come from this source, relative to the weights of the others; null in every
    source: the number of its problems, so that every problem comes equally often."""
    prompt: str = "prompt"
    """Column of the problem: text, or a list of messages {role, content}."""
    answer: str = "answer"
    """Column of the answer: text or a whole number."""
    answer_pattern: str | None = None
    """Regular expression whose last match in the column is the answer, or the group in it, as in '#### (.*)'; null: the
    whole column."""
    id: str | None = None
    """Column of the problem's unique name; null: its row's number."""
    difficulty: str | None = None
    """Column of a number: the first pass over the problems is from low to high; null: every pass is shuffled."""
    metadata: list[str] = field(default_factory=list)
    """Further columns, which rewards find in the metadata of a prompt under the names given here."""
    template: str | None = None
    """data.template for this source; null: the same."""
    question: str | None = None
    """data.question for this source; null: the same."""
    system: str | None = None
    """data.system for this source; null: the same, an empty text: none."""
    reasoning_gym: str | None = None
    """Instead of files: a task of the library reasoning-gym, such as gcd, whose problems are made when the run starts;
    docs/data.md lists the tasks. The reward reasoning_gym scores them."""
    problems: int = 1000
    """reasoning_gym: training problems, before data.validation_size of all sources are held out."""
    test_problems: int = 100
    """reasoning_gym: held-out problems."""
    options: dict[str, Any] = field(default_factory=dict)
    """reasoning_gym: settings of the task, such as {min_terms: 2}."""


@dataclass
class DataConfig:
    """Where prompts come from."""

    task: Annotated[str, OneOf(*GENERATED_TASKS, "jsonl")] = MISSING
    """chain_sum, tiny_code or tiny_mixture, which is both (generated), or jsonl (stored: train_path or sources)."""
    tokenizer: str = "chars"
    """chars (built in: digits, operators and tags, and words of Python for tasks with programs), or a directory with
    a Hugging Face tokenizer; that of run.init_from unless another is named."""
    template: str = "{prompt}"
    """How a problem is presented to a Hugging Face model: a text in which {prompt} is replaced by the problem (the
    beginning-of-text token is added), or chat for the tokenizer's chat template, which is used unless the data option
    has a text when run.init_from brings one."""
    question: str = "{prompt}"
    """How a problem is worded within the template: a text in which {prompt} is replaced by the problem, such as one
    that asks for the final answer in a certain form."""
    system: str | None = None
    """The system's message before every problem, in the chat template; problems that are messages and begin with one
    keep their own. null: none."""
    parse_special: bool = False
    """Special tokens, such as <|im_end|>, that are spelt in a problem count as such: for problems that are whole
    dialogues. Otherwise they are ordinary text, and only the template writes special tokens."""
    min_terms: Annotated[int, Interval("[2, inf)")] = 3
    """chain_sum, tiny_mixture: fewest numbers in a sum."""
    max_terms: Annotated[int, Interval("[2, inf)")] = 5
    """chain_sum, tiny_mixture: most numbers in a sum."""
    languages: list[str] = field(default_factory=list)
    """chain_sum: languages of the working, english and chinese, whose words stand for the digits; with two of them the
    base model mixes both, as it has read both. Empty: the working is in digits."""
    validation_size: Annotated[int, Interval("[1, inf)")] = 200
    """Problems for tuning: for generated tasks disjoint from training and test, permutations of the same numbers
    included; for jsonl taken off the training problems of all sources."""
    test_size: Annotated[int, Interval("[1, inf)")] = 400
    """Held-out problems for the reported accuracy: generated, or for jsonl, when there is no test_path,
    taken off the training problems of all sources."""
    train_path: str | None = None
    """jsonl: training problems in the form of a single source, one {"prompt": ..., "answer": ...} a row, optional "id"
    and "task"."""
    test_path: str | None = None
    """jsonl: held-out problems in the same form; null to hold out data.test_size of the training problems."""
    shared_test_problems: Annotated[int, Interval("[0, inf)")] = 0
    """jsonl: how many problems of a test file may be trained on too, in the same words; more are refused, with their
    names."""
    curriculum: Annotated[str, OneOf("none", "frontier")] = "none"
    """jsonl: none (every pass has all problems) or frontier (problems that are always or never solved come in every
    data.frontier_revisit-th pass only)."""
    frontier_low: Annotated[float, Interval("(-inf, inf)")] = 0.1
    """Lowest pass rate of a problem that comes in every pass, inclusive: the mean of reward.success over the answers of
    its latest group."""
    frontier_high: Annotated[float, Interval("(-inf, inf)")] = 0.9
    """Highest pass rate of a problem that comes in every pass, inclusive."""
    frontier_revisit: Annotated[int, Interval("[2, inf)")] = 4
    """Passes in which a problem with another pass rate comes once."""
    sources: dict[str, SourceConfig] = field(default_factory=dict)
    """jsonl: instead of train_path and test_path, any number of sources by name, for example
    data.sources.gsm8k.path=FILE."""
