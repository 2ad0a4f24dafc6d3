"""Preference pairs, two responses to a prompt of which one is preferred, from JSON Lines files."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from grpo_mega.config.schema import Config, PairsConfig
from grpo_mega.data.examples import Examples, answered, examples_of_files, load_examples
from grpo_mega.data.fields import checked_by
from grpo_mega.data.supervised import asked_in, digest, quoted_in
from grpo_mega.data.tokenizer import Tokenizer
from grpo_mega.types import Row


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
    config: Config, tokenizer: Tokenizer, stop_ids: tuple[int, ...], warn: Callable[[str], None]
) -> Pairs:
    """Preference pairs of a run; see `examples_of_files`, whose errors it raises."""
    longest = config.pairs.max_tokens or config.model.context

    def load(path: Path) -> list[Pair]:
        return load_pairs(path, tokenizer, stop_ids, longest, config.pairs, warn)

    return examples_of_files(config, tokenizer, "pair", load, lambda pairs: digest(rows_of(pairs)))


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
        raise ValueError(
            f"{where}: fields 'chosen' and 'rejected' are the same; nothing can be learned: remove the line"
        )
    return Pair(chosen, rejected, prompt, where), quoted_in(asked, tokenizer)


def rows_of(pairs: Sequence[Pair]) -> list[Row]:
    """Rows of all pairs, the chosen response of each first."""
    return [row for pair in pairs for row in pair.rows]
