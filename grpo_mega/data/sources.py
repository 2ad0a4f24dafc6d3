"""Stored problems of one or several sources: read, split, checked for overlap, and mixed in epochs, exactly
by weight over any stretch of draws."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from grpo_mega.config.schema import DataConfig, SourceConfig
from grpo_mega.data.frontier import FrontierSource, Rule
from grpo_mega.data.huggingface import HuggingFaceTokenizer
from grpo_mega.data.overlap import check_held_out, check_repeated, check_split
from grpo_mega.data.problems import ONLY, Problem, Unreachable, problems_of
from grpo_mega.data.puzzles import AS_MADE, puzzles
from grpo_mega.data.records import Record, records
from grpo_mega.data.source import PromptSource, mixed_epochs, shuffled_draws
from grpo_mega.data.tasks.chain_sum import SPLIT_SEED
from grpo_mega.data.tokenizer import Tokenizer
from grpo_mega.types import Prompt

SECONDS = 5.0
"""Between two words about how many problems are read."""


@dataclass(frozen=True)
class Stored:
    """The stored problems of a run.

    Attributes:
        train: {source: training problems} of every source that is trained on.
        validation: Problems held out of the training files for tuning.
        test: Problems of the test files, or, without any, also held out of the training files.
        identity: Fingerprint of the training problems and of how many are held out.
        warnings: Warnings about problems that quote special tokens or are repeated.
    """

    train: dict[str, list[Problem]]
    validation: list[Prompt]
    test: list[Prompt]
    identity: str
    warnings: tuple[str, ...] = ()


def sources_of(data: DataConfig) -> dict[str, SourceConfig]:
    """{name: source} of the configured sources; data.train_path and data.test_path form one without a name."""
    if data.sources:
        return data.sources
    return {ONLY: SourceConfig(path=data.train_path, test_path=data.test_path)}


def tokenizer_of(source: SourceConfig, data: DataConfig, tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with the source's own template, question and system message."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer
    own = (source.template, source.question, source.system)
    common = (data.template, data.question, data.system)
    if own == (None, None, None):
        return tokenizer
    template, question, system = (c if o is None else o for o, c in zip(own, common, strict=True))
    return tokenizer.asking(template or "", question or "", system)


def read_stored(
    data: DataConfig, tokenizer: Tokenizer, unreachable: Unreachable, tell: Callable[[str], None] = lambda text: None
) -> Stored:
    """Reads every source, holds out problems and checks for duplicates; `tell` is called every few seconds.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A row is not a problem, too few are left for training, or more test problems than allowed are
            trained on.
    """
    warnings: list[str] = []
    train: dict[str, list[Problem]] = {}  # by field and path, as in messages
    test: dict[str, list[Problem]] = {}
    for name, source in sources_of(data).items():
        own = tokenizer_of(source, data, tokenizer)
        if source.reasoning_gym:
            field = f"data.sources.{name}"
            for rows, loaded in zip(puzzles(source, field), (train, test), strict=True):
                what = f"{field}.reasoning_gym={source.reasoning_gym}"
                if rows:
                    loaded[what] = problems_of(rows, what, own, unreachable, warnings.append, name, AS_MADE)
        for path, split, field, loaded in (
            (source.path, source.split, "path", train),
            (source.test_path, source.test_split, "test_path", test),
        ):
            if path:
                told = _told(records(path, split), path, tell)
                problems = problems_of(told, path, own, unreachable, warnings.append, name, source)
                loaded[f"{_field(name, field)}={path}"] = problems
    every = [problem for problems in train.values() for problem in problems]
    kept, validation, taken = _split(every, data, train, bool(test))
    paths = " and ".join(field.partition("=")[2] for field in train)
    if len(kept) < len(held_out := [*validation, *taken]):
        warnings.append(
            f"only {len(kept)} of the {len(every)} problems of {paths} are trained on, {len(held_out)} are held out: "
            f"data.validation_size={data.validation_size}" + ("" if test else f", data.test_size={data.test_size}")
        )
    warnings += check_repeated(_asked(every), paths)
    warnings += check_split(_asked(kept), _asked(validation + taken), paths)
    of_files = {field: _asked(problems) for field, problems in train.items()}
    for field, problems in test.items():
        warnings += check_repeated(_asked(problems), field.partition("=")[2])
        warnings += check_held_out(of_files, _asked(problems), field, data.shared_test_problems)
    tested = [problem for problems in test.values() for problem in problems]
    checksum = hashlib.sha256()
    for problem in every:
        checksum.update(repr(problem).encode())
    identity = f"sha256={checksum.hexdigest()[:16]} held_out={data.validation_size}+{len(taken)}"
    by_source = {name: [p for p in kept if p.source == name] for name in dict.fromkeys(p.source for p in every)}
    return Stored(by_source, _prompts(validation), _prompts(tested or taken), identity, tuple(warnings))


def _told(rows: Iterable[Record], path: str, tell: Callable[[str], None]) -> Iterator[Record]:
    """The rows of a file, whose number is told every few seconds."""
    told = time.monotonic()
    for number, row in enumerate(rows, start=1):
        if number % 500 == 0 and time.monotonic() > told + SECONDS:
            told = time.monotonic()
            tell(f"{number:,} problems of {path} are read")
        yield row


def stream(stored: Stored, data: DataConfig, seed: int, success: str) -> PromptSource | FrontierSource:
    """Source of training prompts: shuffled epochs over each source, mixed by the sources' weights.

    Args:
        stored: The problems.
        data: Mixture weights, difficulty columns, and the curriculum.
        seed: Seed of the order.
        success: Reward term that a curriculum follows, unless `data.frontier_terms` names others.
    """
    configured = dict.fromkeys(stored.train, SourceConfig()) | sources_of(data)  # generated problems have no source
    problems = [_prompts(of_it) for of_it in stored.train.values()]
    weights = [configured[name].weight or len(of_it) for name, of_it in stored.train.items()]
    parts = shares(weights)
    next_source = mixture(parts)
    draws = [
        shuffled_draws(
            len(of_it),
            seed if len(problems) == 1 else f"{seed}/{name}",
            [problem.difficulty for problem in of_it] if configured[name].difficulty else (),
        )
        for name, of_it in stored.train.items()
    ]
    identity = f"{data.task} seed={seed} {stored.identity}"
    if len(problems) > 1:  # other weights would skip some problems and repeat others
        mixed = " ".join(f"{name}={part}" for name, part in zip(stored.train, parts, strict=True))
        identity = f"{identity} shares: {mixed}"
    if data.curriculum == "frontier":
        terms = tuple(data.frontier_terms or [success])
        rule = Rule(terms, data.frontier_low, data.frontier_high, data.frontier_revisit)
        return FrontierSource(problems, draws, next_source, rule, f"{identity} curriculum=frontier")

    return PromptSource(mixed_epochs(problems, draws, next_source), identity)


def _split(
    every: list[Problem], data: DataConfig, train: Mapping[str, list[Problem]], has_test: bool
) -> tuple[list[Problem], list[Problem], list[Problem]]:
    """Splits the training files' problems into training, validation and, without test files, test problems."""
    test_size = 0 if has_test else data.test_size
    held_out = data.validation_size + test_size
    shuffled = random.Random(SPLIT_SEED).sample(every, len(every))
    cut = max(0, len(every) - held_out)
    kept = shuffled[:cut]
    used_up = [
        field for field, problems in train.items() if not {p.source for p in problems} & {p.source for p in kept}
    ]
    if used_up:
        names, instead = "data.validation_size", ""
        if not has_test:
            names, instead = f"{names} + data.test_size", f", or give {_field(every[0].source, 'test_path')}"
        lower = f"lower it to {len(every) - 1} or less" if len(train) == 1 else "lower it"
        raise ValueError(
            f"{names} is {held_out}, but {' and '.join(train)} hold {len(every)} problems and at least one of "
            f"{used_up[0]} must be left for training: {lower}{instead}"
        )
    return kept, shuffled[cut : cut + data.validation_size], shuffled[cut + data.validation_size :]


def _field(name: str, field: str) -> str:
    """Name of the setting that holds a source's file, for messages."""
    if name != ONLY:
        return f"data.sources.{name}.{field}"
    return "data.train_path" if field == "path" else "data.test_path"


def _asked(problems: Sequence[Problem]) -> list[Prompt]:
    """The problems without their source's template, so that equal problems compare equal."""
    return [replace(problem.prompt, text=problem.asked) for problem in problems]


def _prompts(problems: Sequence[Problem]) -> list[Prompt]:
    return [problem.prompt for problem in problems]


def shares(weights: Sequence[float]) -> list[Fraction]:
    """Each weight's share of their sum, as an exact fraction: 0.1 is a tenth."""
    exact = [Fraction(str(weight)) for weight in weights]
    return [weight / sum(exact) for weight in exact]


def mixture(parts: Sequence[Fraction]) -> Callable[[int], tuple[int, int]]:
    """k -> (source, number of earlier draws from it) of draw k, for positive shares that sum to 1.

    The first source has floor(k p) of the first k draws, which spreads its draws evenly (Bresenham's line); the others
    share the rest in the same way. So each source's share of the first k draws is off by fewer draws than there are
    sources, and its own draws are numbered 0, 1, 2, ...
    """
    left = [sum(parts[i:], Fraction(0)) for i in range(len(parts))]
    of_left = [part / rest for part, rest in zip(parts, left, strict=True)]

    def draw(k: int) -> tuple[int, int]:
        for source, part in enumerate(of_left):
            before = k * part.numerator // part.denominator
            if (k + 1) * part.numerator // part.denominator > before:
                return source, before
            k -= before
        raise AssertionError("the last source takes what is left")

    return draw
