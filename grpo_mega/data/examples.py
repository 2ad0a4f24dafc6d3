"""Training examples for reward models: read from JSON Lines files, split into learned and held out, and ordered.

Preference pairs (two responses to a prompt, one of them preferred) are read here; answers with labelled steps are in
`labelled_steps`.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from grpo_mega.config.schema import PairsConfig, files_in
from grpo_mega.data.chat import Turn
from grpo_mega.data.problems import SHOWN, checked_by, warn_of_quoting
from grpo_mega.data.prompt_order import shuffled_draws
from grpo_mega.data.records import records
from grpo_mega.data.supervised import asked_in, check_schedule, digest, learned_length, missing_end, quoted_in
from grpo_mega.data.tokenizer import Tokenizer, fingerprint
from grpo_mega.errors import InputError, instead_of
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
    pairs: PairsConfig,
    seed: int,
    tokenizer: Tokenizer,
    name: str,
    load: Callable[[Path], list[E]],
    digest: Callable[[Sequence[E]], str],
) -> Examples[E]:
    """Shuffled epochs over the examples of `pairs.path`, mixed with replayed ones of `pairs.replay_path`; the last
    step may have fewer examples than the others.

    Args:
        pairs: Files, split and order.
        seed: Seed of the run.
        tokenizer: Tokenizer of the examples.
        name: Noun for an example in messages, such as "pair".
        load: Reads a file.
        digest: Computes a checksum of examples.

    Raises:
        InputError: A file is missing, a line is not an example (names file, line and field), an example is both learned
            and held out, there are too few examples, or the warm-up or the decay is too long.
    """

    def read(files: Sequence[str]) -> list[E]:
        return [example for file in files for example in load(Path(file))]

    trained, replayed = read(files_in(pairs.path)), read(files_in(pairs.replay_path))
    test = read([pairs.test_path]) if pairs.test_path else []
    if pairs.test_size:
        trained, test = held_out(trained, pairs.test_size)
        if not trained:
            what = f"leaves no {name} of pairs.path={pairs.path} to learn"
            raise InputError(f"pairs.test_size={pairs.test_size}", what, "lower it")
    _check_apart([*trained, *replayed], test, name)
    if len(trained) < pairs.batch_size:
        what = f"only {len(trained)} {name}s to learn from, fewer than pairs.batch_size={pairs.batch_size}"
        fix = f"lower that to {len(trained)} or less, or give more {name}s"
        raise InputError(f"pairs.path={pairs.path}", what, fix)
    # A fraction of the decimal as written: int(k * share) must not depend on rounding.
    share = Fraction(str(pairs.replay_share)) if replayed else Fraction(0)
    # `pairs.epochs` counts passes over the examples to learn; replayed ones come on top and lengthen the run.
    count = int(pairs.epochs * len(trained) / (1 - share))
    steps = -(-count // pairs.batch_size)
    check_schedule(pairs, "pairs", steps, f"{len(trained)} {name}s")
    draw, again = shuffled_draws(len(trained), seed), shuffled_draws(max(1, len(replayed)), f"{seed}/replay")

    def example_at(k: int) -> E:
        # Replayed examples are spread evenly: one is due whenever the number of those before rises.
        before = int(k * share)
        return replayed[again(before)[1]] if int((k + 1) * share) > before else trained[draw(k - before)[1]]

    def of_step(step: int) -> list[E]:
        first = step * pairs.batch_size
        return [example_at(k) for k in range(first, min(first + pairs.batch_size, count))]

    of_files = ", ".join(files_in(pairs.path) + files_in(pairs.replay_path))
    checksums = "+".join(digest(part) for part in (trained, replayed, test))
    return Examples(of_step, steps, test, f"{of_files} sha256={checksums} seed={seed}", fingerprint(tokenizer))


def _check_apart(learned: Sequence[E], test: Sequence[E], name: str) -> None:
    """Raises InputError when a held-out example is also learned, even with another label."""
    # Compared without labels: a completion held out as wrong and learned as right would be as much of a leak.
    where = {example.content: example.where for example in learned}
    for example in test:
        if example.content in where:
            what = f"the held-out {name} is also learned ({where[example.content]})"
            raise InputError(example.where, what, "remove one of the two")


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
        InputError: The file is missing, or a line is not an example or too long; names file, line and field.
    """
    if not path.is_file():
        raise InputError(str(path), f"no such file of {name}s{instead_of(path)}", "correct the path")
    examples: list[E] = []
    quoting: list[str] = []
    for record in records(path):
        example, quoted = parse(record.fields, record.where)
        quoting += [f"{record.where} ({quoted[0]})"] if quoted else []
        examples.append(example)
    if not examples:
        raise InputError(str(path), "the file is empty", f"write one {name} a line")
    # Lengths are checked once all lines are read, so that one message counts every line that is too long.
    sizes = [max(len(row.token_ids) for row in example.rows) for example in examples]
    too_long = [f"{each.where} ({size})" for each, size in zip(examples, sizes, strict=True) if size > longest]
    if too_long:
        limit = "pairs.max_tokens" if pairs.max_tokens else "model.context"
        shown = ", ".join(too_long[:SHOWN]) + (", ..." if len(too_long) > SHOWN else "")
        raise InputError(
            str(path),
            f"{len(too_long)} of {len(examples)} {name}s are longer than {limit} ({longest} tokens): {shown}",
            f"shorten or remove them, or raise {limit}",
        )
    warn_of_quoting(quoting, len(examples), f"{name}s of {path}", warn)
    return examples


def answered(
    asked: str | list[Turn], response: str, field: str, where: str, tokenizer: Tokenizer, stop_ids: tuple[int, ...]
) -> tuple[int, list[int]]:
    """Number of tokens of the prompt; and the tokens of prompt and response, up to the one that ends the response.

    Raises InputError that begins with `where`, and names the response's `field` if that is at fault.
    """
    try:
        prompt, ids = tokenizer.answered(asked, response)
    except InputError as error:
        raise InputError(f"{where}: field 'prompt': {error.where}", error.what, error.fix) from error
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
    return [example for prompt, group in of_prompt.items() if prompt not in out for example in group], test


@dataclass(frozen=True)
class Pair:
    """A preference pair: two responses, each after the prompt and with its end token.

    Attributes:
        chosen: The preferred response; its last token, at which a reward model's score is read, is marked as learned.
        rejected: The other response, marked in the same way.
        prompt: Number of tokens of the prompt.
        where: File and line.
    """

    chosen: Row
    rejected: Row
    prompt: int
    where: str

    @property
    def rows(self) -> tuple[Row, Row]:
        """Rows of both responses, the chosen one first."""
        return self.chosen, self.rejected

    @property
    def content(self) -> frozenset[bytes]:
        """Both responses in no order: the key of pairs that must not be both learned and held out."""
        return frozenset(array("i", row.token_ids).tobytes() for row in self.rows)


Pairs = Examples[Pair]


def pairs_of_files(
    pairs: PairsConfig,
    context: int,
    seed: int,
    tokenizer: Tokenizer,
    stop_ids: tuple[int, ...],
    warn: Callable[[str], None],
) -> Pairs:
    """Preference pairs of a run; see `examples_of_files`, whose errors it raises."""

    def load(path: Path) -> list[Pair]:
        return load_pairs(path, tokenizer, stop_ids, pairs.max_tokens or context, pairs, warn)

    return examples_of_files(pairs, seed, tokenizer, "pair", load, lambda read: digest(rows_of(read)))


def load_pairs(
    path: Path,
    tokenizer: Tokenizer,
    stop_ids: tuple[int, ...],
    longest: int,
    pairs: PairsConfig,
    warn: Callable[[str], None] = lambda text: None,
) -> list[Pair]:
    """Reads one {"prompt": text or messages, "chosen": text, "rejected": text} a line; other fields are ignored.

    A response without an end token gets one. See `load_examples`, whose errors it raises.
    """
    return load_examples(path, "pair", partial(_pair, tokenizer, stop_ids), longest, pairs, warn)


def _pair(
    tokenizer: Tokenizer, stop_ids: tuple[int, ...], record: dict[str, Any], where: str
) -> tuple[Pair, list[str]]:
    """Preference pair of one line, and the special tokens quoted in its prompt."""
    asked = asked_in(record, where, tokenizer)
    rows, prompt = [], 0
    for field in ("chosen", "rejected"):
        response = checked_by(tokenizer.checked, record.get(field), field, where)
        prompt, ids = answered(asked, response, field, where, tokenizer, stop_ids)
        rows.append(Row(array("i", ids), ((len(ids) - 1, len(ids)),)))
    chosen, rejected = rows
    if chosen == rejected:
        what = "are the same, so nothing can be learned"
        raise InputError(f"{where}: fields 'chosen' and 'rejected'", what, "remove the line")
    return Pair(chosen, rejected, prompt, where), quoted_in(asked, tokenizer)


def rows_of(pairs: Sequence[Pair]) -> list[Row]:
    """Rows of all pairs, the chosen response of each first."""
    return [row for pair in pairs for row in pair.rows]
