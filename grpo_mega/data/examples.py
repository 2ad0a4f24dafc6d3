"""Training examples for reward models: read from JSON Lines files, split into learned and held out, and ordered."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from grpo_mega.config.rules.optimizer import schedule_problems
from grpo_mega.config.schema import Config, PairsConfig, files_in
from grpo_mega.data.chat import Turn
from grpo_mega.data.problems import SHOWN, warn_of_quoting
from grpo_mega.data.records import records
from grpo_mega.data.source import shuffled_draws
from grpo_mega.data.supervised import learned_length, missing_end
from grpo_mega.data.tokenizer import Tokenizer, fingerprint
from grpo_mega.types import Row

SPLIT_SEED = "held-out pairs"
"""Seed for choosing the `pairs.test_size` held-out examples, independent of the run's seed, so that all runs share
them."""


class Example(Protocol):
    """A training example of a reward model: one or more responses to a prompt."""

    @property
    def prompt(self) -> int:
        """Number of tokens of the prompt."""

    @property
    def where(self) -> str:
        """File and line of the example."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """Responses, each after the prompt; the tokens at which a score is read are marked as learned."""

    @property
    def content(self) -> Hashable:
        """Key that is equal for examples that must not be both learned and held out."""


E = TypeVar("E", bound=Example)


@dataclass(frozen=True)
class Examples(Generic[E]):
    """Examples of each step as a pure function of the step, so that resuming needs only its number.

    Attributes:
        of_step: Number of finished steps -> the examples of the next step.
        steps: Number of steps.
        test: Held-out examples.
        identity: Fingerprint of the examples and their order, compared when a run is resumed.
        tokenizer: Checksum of the tokenizer's vocabulary.
    """

    of_step: Callable[[int], list[E]]
    steps: int
    test: list[E]
    identity: str
    tokenizer: str


def examples_of_files(
    config: Config,
    tokenizer: Tokenizer,
    name: str,
    load: Callable[[Path], list[E]],
    digest: Callable[[Sequence[E]], str],
) -> Examples[E]:
    """Shuffled epochs over the examples of `pairs.path`, mixed with replayed ones of `pairs.replay_path`.

    The last step may have fewer examples than the others.

    Args:
        config: The configuration.
        tokenizer: Tokenizer of the examples.
        name: Noun for an example in messages, such as "pair".
        load: Reads a file.
        digest: Computes a checksum of examples.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A line cannot be read (names file, line and field), an example is learned and held out, there are
            too few, or the warm-up or the decay is too long.
    """
    pairs, seed = config.pairs, config.run.seed

    def read(files: Sequence[str]) -> list[E]:
        return [example for file in files for example in load(Path(file))]

    trained, replayed = read(files_in(pairs.path)), read(files_in(pairs.replay_path))
    test = read([pairs.test_path]) if pairs.test_path else []
    if pairs.test_size:
        trained, test = held_out(trained, pairs.test_size)
        if not trained:
            raise ValueError(
                f"pairs.test_size={pairs.test_size} leaves no {name} of pairs.path={pairs.path} to learn; lower it"
            )
    _refuse_learned(test, [*trained, *replayed], name)
    if len(trained) < pairs.batch_size:
        raise ValueError(
            f"pairs.path={pairs.path}: {len(trained)} {name}s to learn are fewer than pairs.batch_size="
            f"{pairs.batch_size}; lower that to {len(trained)} or less, or give more {name}s"
        )
    share = Fraction(str(pairs.replay_share)) if replayed else Fraction(0)
    count = int(pairs.epochs * len(trained) / (1 - share))
    steps = -(-count // pairs.batch_size)
    _check_schedule(pairs, steps, f"{len(trained)} {name}s")
    draw, again = shuffled_draws(len(trained), seed), shuffled_draws(max(1, len(replayed)), f"{seed}/replay")

    def example_at(k: int) -> E:
        before = int(k * share)  # number of replayed examples among the first k
        return replayed[again(before)[1]] if int((k + 1) * share) > before else trained[draw(k - before)[1]]

    def of_step(step: int) -> list[E]:
        first = step * pairs.batch_size
        return [example_at(k) for k in range(first, min(first + pairs.batch_size, count))]

    of_files = ", ".join(files_in(pairs.path) + files_in(pairs.replay_path))
    checksums = "+".join(digest(part) for part in (trained, replayed, test))
    return Examples(of_step, steps, test, f"{of_files} sha256={checksums} seed={seed}", fingerprint(tokenizer))


def load_examples(
    path: Path,
    name: str,
    parse: Callable[[dict[str, Any], str], tuple[E, list[str]]],
    longest: int,
    pairs: PairsConfig,
    warn: Callable[[str], None],
) -> list[E]:
    """Reads one example from each line of a file.

    Args:
        path: The file.
        name: Noun for an example in messages.
        parse: (JSON object, file and line) -> example, and the special tokens quoted in its prompt.
        longest: Largest number of tokens of a prompt with a response.
        pairs: The settings.
        warn: Called about prompts that quote special tokens.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A line cannot be read, or is longer than `longest` tokens; names file, line and field.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file of {name}s")
    read: list[E] = []
    quoting: list[str] = []
    for record in records(path):
        example, quoted = parse(record.fields, record.where)
        quoting += [f"{record.where} ({quoted[0]})"] if quoted else []
        read.append(example)
    if not read:
        raise ValueError(f"{path}: the file is empty; it needs one {name} a line")
    _refuse_long(read, longest, pairs, f"{path}: ", name)
    warn_of_quoting(quoting, len(read), f"{name}s of {path}", warn)
    return read


def answered(
    asked: str | list[Turn], response: str, field: str, where: str, tokenizer: Tokenizer, stop_ids: tuple[int, ...]
) -> tuple[int, list[int]]:
    """Number of tokens of the prompt; and the tokens of prompt and response, up to the one that ends the response.

    Raises ValueError that begins with `where`, and names the response's `field` if that is at fault.
    """
    try:
        prompt, ids = tokenizer.answered(asked, response)
    except ValueError as error:
        raise ValueError(f"{where}: field 'prompt': {error}") from error
    here = f"{where}: field {field!r}"
    ids = ids + missing_end(ids, stop_ids, tokenizer, here)
    return len(prompt), prompt + ids[: learned_length(ids, stop_ids, tokenizer, here)]


def held_out(examples: Sequence[E], size: int) -> tuple[list[E], list[E]]:
    """Splits examples into learned and held out, by prompt: prompts are drawn until `size` or more are held out.

    With a prompt in both, a model would score well that has only memorised the prompt's answer.
    """
    of_prompt: dict[bytes, list[E]] = {}
    for example in examples:
        prompt = array("i", example.rows[0].token_ids[: example.prompt]).tobytes()
        of_prompt.setdefault(prompt, []).append(example)
    prompts = [*of_prompt]
    random.Random(SPLIT_SEED).shuffle(prompts)
    test: list[E] = []
    out: set[bytes] = set()
    for prompt in prompts:
        if len(test) >= size:
            break
        test += of_prompt[prompt]
        out.add(prompt)
    return [example for prompt, own in of_prompt.items() if prompt not in out for example in own], test


def _refuse_learned(test: Sequence[E], learned: Sequence[E], name: str) -> None:
    """Raises ValueError when a held-out example is also learned, even with another label."""
    where = {example.content: example.where for example in learned}
    for example in test:
        if example.content in where:
            raise ValueError(
                f"{example.where}: the held-out {name} is also learned ({where[example.content]}); remove one of the "
                "two"
            )


def _refuse_long(read: Sequence[E], longest: int, pairs: PairsConfig, begin: str, name: str) -> None:
    sizes = [max(len(row.token_ids) for row in example.rows) for example in read]
    too_long = [f"{each.where} ({size})" for each, size in zip(read, sizes, strict=True) if size > longest]
    if too_long:
        limit = "pairs.max_tokens" if pairs.max_tokens else "model.context"
        shown = ", ".join(too_long[:SHOWN]) + (", ..." if len(too_long) > SHOWN else "")
        raise ValueError(
            f"{begin}{len(too_long)} of {len(read)} {name}s are longer than {limit} ({longest} tokens): {shown}; "
            f"shorten or remove them, or raise {limit}"
        )


def _check_schedule(pairs: PairsConfig, steps: int, learned: str) -> None:
    if pairs.warmup_steps >= steps:
        raise ValueError(
            f"pairs.warmup_steps={pairs.warmup_steps} must be below the {steps} steps that pairs.epochs={pairs.epochs} "
            f"of {learned} take; lower it to {steps - 1} or less, or raise pairs.epochs"
        )
    for problem in schedule_problems(pairs, "pairs", steps, "pairs.epochs"):
        raise ValueError(problem)
