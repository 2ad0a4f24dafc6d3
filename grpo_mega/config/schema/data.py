"""Data: prompts, tokenizer and template."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from omegaconf import MISSING

from grpo_mega.config.limits import Interval, OneOf, With

GENERATED_TASKS = ("chain_sum", "tiny_code", "tiny_guess", "tiny_mixture", "tiny_product")
"""Tasks whose problems are generated; those of all other tasks are stored."""
GENERATED = With("task", OneOf(*GENERATED_TASKS))
STORED = With("task", OneOf("jsonl"))


@dataclass
class SourceConfig:
    """A source of problems and how to read it; NAME is the task of its problems. A column is named by its path, such as
    reward_model.ground_truth or messages.0.content."""

    path: str | None = None
    """Training problems: a .jsonl, .json, .csv, .tsv, .parquet or .arrow file (texts also as .gz), or a folder of them;
    null for a source used only for testing, or with reasoning_gym."""
    split: str = "train"
    """Split with the training problems in a folder, by the names of its files and folders."""
    test_path: str | None = None
    """Held-out problems, in any format of `path`."""
    test_split: str = "test"
    """Split with the held-out problems in a folder."""
    weight: float | None = None
    """Share of the training prompts, relative to the other sources' weights; null in every source: all problems equally
    often."""
    prompt: str = "prompt"
    """Column of the problem: text, or a list of messages {role, content}."""
    answer: str | None = "answer"
    """Column of the answer: text or a whole number; null if no term reads one."""
    answer_pattern: str | None = None
    """Regular expression whose last match in the column, or its group, is the answer, as in '#### (.*)'; null: the
    whole column."""
    id: str | None = None
    """Column of the problem's unique id; null: the row's number."""
    difficulty: str | None = None
    """Column of the difficulty, a number: the first epoch goes from low to high; null: every epoch is shuffled."""
    metadata: list[str] = field(default_factory=list)
    """Further columns, for rewards: the prompt's metadata under these names."""
    template: str | None = None
    """data.template for this source; null for data.template."""
    question: str | None = None
    """data.question for this source; null for data.question."""
    system: str | None = None
    """data.system for this source; null for data.system, an empty text for none."""
    reasoning_gym: str | None = None
    """Instead of files: a task of the library reasoning-gym, such as gcd, whose problems are generated at the start
    (docs/data.md)."""
    problems: int = 1000
    """reasoning_gym: training problems, including those held out for validation."""
    test_problems: int = 100
    """reasoning_gym: held-out problems."""
    options: dict[str, Any] = field(default_factory=dict)
    """reasoning_gym: settings of the task, such as {min_terms: 2}."""


@dataclass
class DataConfig:
    """Data: task, tokenizer, prompt template, problems and their order."""

    task: Annotated[str, OneOf(*GENERATED_TASKS, "jsonl")] = MISSING
    """chain_sum, tiny_code, tiny_mixture of both, tiny_guess or tiny_product (generated), or jsonl (stored: train_path
    or sources)."""
    tokenizer: Annotated[str, STORED] = "chars"
    """chars (built in, for generated tasks), or a directory with a Hugging Face tokenizer; by default that of
    run.init_from."""
    template: str = "{prompt}"
    """Template of the prompt for a Hugging Face model: a text in which {prompt} stands for the problem (the
    beginning-of-text token is added), or chat for the tokenizer's chat template, the default if run.init_from has one
    and the data option sets no text."""
    question: str = "{prompt}"
    """Wording of the problem, {prompt}, within the template, such as a request for a form of the answer."""
    system: str | None = None
    """System message before every problem, in the chat template; problems that are chats with a system message keep
    theirs."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as {enable_thinking: false} of Qwen3, {reasoning_effort: low} of GPT-OSS, or
    `tools`, an environment's schemas (from `grpo_mega.new --environment`)."""
    date: str | None = None
    """Day that a chat template writes as today's, YYYY-MM-DD; null: the day on which the run began, in UTC."""
    parse_special: bool = False
    """Parse special tokens, such as <|im_end|>, in problems, for whole dialogues; otherwise they are ordinary text."""
    min_terms: Annotated[int, Interval("[2, inf)")] = 3
    """chain_sum, tiny_mixture: fewest numbers in a sum."""
    max_terms: Annotated[int, Interval("[2, inf)")] = 5
    """chain_sum, tiny_mixture: most numbers in a sum."""
    languages: Annotated[list[str], With("task", OneOf("chain_sum"))] = field(default_factory=list)
    """Languages (english, chinese) whose number words the working uses; with two, the base model mixes them. Empty:
    digits."""
    validation_size: Annotated[int, Interval("[1, inf)")] = 200
    """Validation problems: generated (never a permutation of a training or test problem), or held out of the training
    problems of all sources."""
    test_size: Annotated[int, Interval("[1, inf)")] = 400
    """Test problems: generated, or, without test_path, held out of the training problems of all sources."""
    train_size: Annotated[int | None, Interval("[1, inf)"), GENERATED] = None
    """Different training problems (tiny_mixture: half of each task), repeated in every epoch and the same for every
    run.seed; null: new problems without end."""
    train_path: Annotated[str | None, STORED] = None
    """Training problems as a single source, one {"prompt": ..., "answer": ...} a row, optional "id" and "task"."""
    test_path: Annotated[str | None, STORED] = None
    """Test problems, like train_path; null holds out data.test_size training problems."""
    shared_test_problems: Annotated[int, Interval("[0, inf)")] = 0
    """Problems of a test file that may also be trained on; more are refused, with their ids."""
    curriculum: Annotated[str, OneOf("none", "frontier")] = "none"
    """none (every epoch has all problems) or frontier (problems that are always or never solved appear only in every
    data.frontier_revisit-th epoch)."""
    frontier_low: Annotated[float, Interval("(-inf, inf)")] = 0.1
    """frontier: lowest pass rate of a problem that appears in every epoch: the mean over its latest group of
    reward.success, or of its task's term among frontier_terms."""
    frontier_high: Annotated[float, Interval("(-inf, inf)")] = 0.9
    """frontier: highest such pass rate."""
    frontier_revisit: Annotated[int, Interval("[2, inf)")] = 4
    """frontier: other problems appear once in this many epochs."""
    frontier_terms: list[str] = field(default_factory=list)
    """frontier: reward terms, if tasks have different rewards: the first that applies to a problem's task gives its
    pass rate. Empty: reward.success."""
    sources: Annotated[dict[str, SourceConfig], STORED] = field(default_factory=dict)
    """Instead of train_path and test_path, sources by name, such as data.sources.gsm8k.path=FILE."""
