"""Rows of supervised steps, from a JSON Lines file of chats or of prompts and completions, and their order."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from grpo_mega.config.rules.optimizer import schedule_problems
from grpo_mega.config.rules.shared import refuse
from grpo_mega.config.schema import PairsConfig, SFTConfig
from grpo_mega.data.chat import ASSISTANT, Turn
from grpo_mega.data.problems import SHOWN, checked_by, turns_of, warn_of_quoting
from grpo_mega.data.prompt_order import shuffled_draws
from grpo_mega.data.records import json_lines, json_object, records
from grpo_mega.data.tokenizer import Tokenizer, fingerprint
from grpo_mega.errors import InputError, instead_of
from grpo_mega.types import Row, sampled_spans


@dataclass(frozen=True)
class SupervisedRows:
    """Rows of each supervised step as a pure function of the step, so that resuming needs only its number.

    Attributes:
        of_step: Number of finished steps -> the rows of the next step.
        steps: Number of steps.
        identity: Fingerprint of the rows and their order, compared when a run is resumed.
    """

    of_step: Callable[[int], list[Row]]
    steps: int
    identity: str


def rows_of_file(
    sft: SFTConfig,
    tokenizer: Tokenizer,
    stop_ids: tuple[int, ...],
    context: int,
    seed: int,
    warn: Callable[[str], None],
) -> SupervisedRows:
    """Shuffled epochs over the rows of `sft.path`. With `sft.epochs` the last step may have fewer rows than the others.

    Raises:
        InputError: The file is missing, a line is not an example (names file, line and field), or the warm-up or the
            decay is too long.
    """
    assert sft.path, "rows_of_file is for sft.path"
    rows = load_rows(sft, tokenizer, stop_ids, sft.max_tokens or context, warn)
    count = sft.epochs * len(rows) if sft.epochs else sft.steps * sft.batch_size
    steps = -(-count // sft.batch_size)
    check_schedule(sft, "sft", steps, f"{len(rows)} rows")
    draw = shuffled_draws(len(rows), seed)

    def of_step(step: int) -> list[Row]:
        first = step * sft.batch_size
        return [rows[draw(k)[1]] for k in range(first, min(first + sft.batch_size, count))]

    return SupervisedRows(of_step, steps, f"{sft.path} sha256={digest(rows)} seed={seed}")


def check_schedule(settings: SFTConfig | PairsConfig, section: str, steps: int, learned: str) -> None:
    """Raises InputError when the warm-up or the decay of a stage does not fit into its steps.

    Checked here because the number of steps follows from the number of examples, which the rules of the configuration
    do not know.

    Args:
        settings: The stage's settings.
        section: Section of the configuration that has them, "sft" or "pairs".
        steps: Number of steps.
        learned: The examples, for messages: "120 rows".
    """
    if settings.warmup_steps >= steps:
        raise InputError(
            f"{section}.warmup_steps={settings.warmup_steps}",
            f"must be below the {steps} steps that {section}.epochs={settings.epochs} of {learned} take",
            f"lower it to {steps - 1} or less, or raise {section}.epochs",
        )
    refuse([*schedule_problems(settings, section, steps, f"{section}.epochs")])


def load_rows(
    sft: SFTConfig,
    tokenizer: Tokenizer,
    stop_ids: tuple[int, ...],
    longest: int,
    warn: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Reads one {"messages": [{"role", "content"}, ...]} or {"prompt": str or messages, "completion": str} a line.

    Every assistant turn in `messages`, or the completion, is learned with its end token, which is added to a completion
    that has none. With `token_ids` and `given`, which rejection sampling writes, these tokens are learned instead,
    without the spans `given`, after `prompt_ids` or else the prompt; `vocabulary` is the fingerprint of their
    tokenizer. Other fields are ignored.
    `sft.too_long` says what happens to rows of more than `longest` tokens. `warn` is called about prompts that quote
    special tokens.

    Raises:
        InputError: The file is missing, or a line is not an example; names file, line and field.
    """
    path = Path(sft.path or "")
    if not path.is_file():
        raise InputError(f"sft.path={path}", f"no such file{instead_of(path)}", "correct the path")
    rows: list[Row] = []
    too_long: list[str] = []
    quoting: list[str] = []
    vocabulary = cache(partial(fingerprint, tokenizer))
    for record in records(path):
        where = record.where
        # Tables have every column in every row, so that a column may be there without a value.
        as_tokens = record.fields.get("token_ids") is not None and record.fields.get("given") is not None
        if as_tokens and record.fields.get("vocabulary") != vocabulary():
            what = "missing, or of another tokenizer than this run's"
            fix = "sample with a model that has this run's tokenizer"
            raise InputError(f"{where}: field 'vocabulary'", what, fix)
        row, quoted = (_row_of_tokens if as_tokens else _row)(record.fields, where, tokenizer, stop_ids)
        # A row may be cut only if something to learn is left before the cut.
        if len(row.token_ids) > longest and not (sft.too_long == "cut" and row.learned[0][0] < longest):
            too_long.append(f"{where} ({len(row.token_ids)})")
        quoting += [f"{where} ({quoted[0]})"] if quoted else []
        learned = tuple((first, min(end, longest)) for first, end in row.learned if first < longest)
        rows.append(Row(row.token_ids[:longest], learned))
    if not rows:
        raise InputError(str(path), "the file is empty", "write one row a line")
    if too_long:
        limit = "sft.max_tokens" if sft.max_tokens else "model.context"
        why = "cut off, have nothing left to learn" if sft.too_long == "cut" else f"are longer than {limit}"
        shown = ", ".join(too_long[:SHOWN]) + (", ..." if len(too_long) > SHOWN else "")
        raise InputError(
            f"sft.path={path}",
            f"{len(too_long)} of {len(rows)} rows {why} ({longest} tokens): {shown}",
            f"shorten or remove them, raise {limit}"
            + ("" if sft.too_long == "cut" else ", or set sft.too_long=cut, which cuts off their ends"),
        )
    warn_of_quoting(quoting, len(rows), f"rows of {path}", warn)
    return rows


def plain_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of a file unchanged, to be copied to another; `load_rows` reads their content.

    Raises:
        InputError: There is no such file, or a line is not a row; names file and line.
    """
    for number, line in json_lines(path):
        where = f"{path}:{number}"
        record = json_object(line, where)
        _check_form(record, where)
        yield record


def _check_form(record: dict[str, Any], where: str) -> None:
    if ("messages" in record) == ("prompt" in record or "completion" in record):
        fix = "write either field 'messages', or 'prompt' and 'completion'"
        raise InputError(where, "must be either a chat or a prompt with its completion", fix)


def _row(record: dict[str, Any], where: str, tokenizer: Tokenizer, stop_ids: tuple[int, ...]) -> tuple[Row, list[str]]:
    """Row of one line of the file, and the special tokens quoted in its prompt."""
    asked, completion = _parsed(record, where, tokenizer)
    try:
        if completion is not None:
            parts, written = tokenizer.answered(asked, completion), ["completion"]
        else:
            assert not isinstance(asked, str), "a problem has a completion"
            parts = tokenizer.chat(asked)
            written = [f"messages[{i}].content" for i, turn in enumerate(asked) if turn.role == ASSISTANT]
    except InputError as error:
        field = "messages" if completion is None else "prompt"
        raise InputError(f"{where}: field {field!r}: {error.where}", error.what, error.fix) from error
    if completion is not None:
        parts[1] += missing_end(parts[1], stop_ids, tokenizer, f"{where}: field 'completion'")
    ids: list[int] = []
    learned = []
    for read_part, part, field in zip(parts[::2], parts[1::2], written, strict=True):
        first = len(ids) + len(read_part)
        learned.append((first, first + learned_length(part, stop_ids, tokenizer, f"{where}: field {field!r}")))
        ids += read_part + part
    # Nothing learns from tokens after the last learned one, which would only cost time.
    return Row(array("i", ids[: learned[-1][1]]), tuple(learned)), quoted_in(asked, tokenizer)


def _row_of_tokens(
    record: dict[str, Any], where: str, tokenizer: Tokenizer, stop_ids: tuple[int, ...]
) -> tuple[Row, list[str]]:
    """`_row` of a line whose completion is given as tokens."""
    ids, given, fix = record["token_ids"], record["given"], "write what tools/rejection_sample.py writes"
    asked, prompt = asked_in(record, where, tokenizer), record.get("prompt_ids")
    try:
        if prompt is None:
            _, prompt = tokenizer.prompt(asked)
        ends = {*stop_ids, tokenizer.token_id(str(record["close"]))} if record.get("close") else {*stop_ids}
    except InputError as error:
        raise InputError(f"{where}: {error.where}", error.what, error.fix) from error
    for field, tokens in (("token_ids", ids), ("prompt_ids", prompt)):
        if not isinstance(tokens, list) or not all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in tokens):
            what = f"must be a list of tokens, from 0 to {tokenizer.vocab_size - 1}"
            raise InputError(f"{where}: field {field!r}", what, fix)
    try:
        bounds = [bound for first, end in given for bound in (first, end)]
        # A reply may be empty.
        valid = bounds == sorted(bounds) and all(type(bound) is int and 0 <= bound <= len(ids) for bound in bounds)
    except (TypeError, ValueError):
        valid = False
    learned = sampled_spans(len(ids), given) if valid else []
    if not learned:
        what = f"must be disjoint spans [first, one past the last] of the {len(ids)} tokens that leave some to learn"
        raise InputError(f"{where}: field 'given'", what, fix)
    early = any(i in stop_ids for first, end in learned for i in ids[first : end - 1])
    if stop_ids and (early or ids[learned[-1][1] - 1] not in ends):
        what = "must end with a token that ends a completion, and no turn may have one before its end"
        raise InputError(f"{where}: field 'token_ids'", what, "set rollout.stop to what the samples ended with")
    # Nothing learns from tokens after the last learned one, as in `_row`.
    row = array("i", prompt + ids[: learned[-1][1]])
    spans = tuple((len(prompt) + first, len(prompt) + end) for first, end in learned)
    return Row(row, spans), quoted_in(asked, tokenizer)


def quoted_in(asked: str | list[Turn], tokenizer: Tokenizer) -> list[str]:
    """Special tokens spelled in a prompt, or in parts of a chat that the assistant did not write; encoded as text."""
    read = [asked] if isinstance(asked, str) else [turn.content for turn in asked if turn.role != ASSISTANT]
    return [token for text in read for token in tokenizer.quoted(text)]


def _parsed(record: dict[str, Any], where: str, tokenizer: Tokenizer) -> tuple[str | list[Turn], str | None]:
    """(prompt, completion), where the prompt is a problem or a chat; or (whole chat, None)."""
    _check_form(record, where)
    if "tools" in record:
        raise InputError(f"{where}: field 'tools'", "is not read", "write the tools into a system turn")
    if "messages" not in record:
        asked = asked_in(record, where, tokenizer)
        return asked, checked_by(tokenizer.checked, record.get("completion"), "completion", where)
    turns = turns_of(record["messages"], "messages", where, tokenizer.checked)
    if all(turn.role != ASSISTANT for turn in turns):
        what = "has no turn of the assistant's, so nothing can be learned"
        raise InputError(f"{where}: field 'messages'", what, "add one, or remove the row")
    if turns[0].role == ASSISTANT:
        fix = "put the message that it answers first"
        raise InputError(f"{where}: field 'messages'", "begins with the assistant", fix)
    return turns, None


def asked_in(record: dict[str, Any], where: str, tokenizer: Tokenizer) -> str | list[Turn]:
    """Prompt of a record, a problem or a chat. Raises InputError that begins with `where`."""
    asked = record.get("prompt")
    turns = turns_of(asked, "prompt", where, tokenizer.checked) if isinstance(asked, list) else None
    return turns or checked_by(tokenizer.checked, asked, "prompt", where)


def missing_end(completion: list[int], stop_ids: tuple[int, ...], tokenizer: Tokenizer, where: str) -> list[int]:
    """End token that a completion lacks, as a list; empty if it has one or `stop_ids` is empty.

    `where` is the file, line and field, for errors.
    """
    if not stop_ids or not set(stop_ids).isdisjoint(completion):
        return []
    # Without the tokenizer's own end of text, only a single stop token leaves no choice.
    if tokenizer.eos_id in stop_ids:
        return [tokenizer.eos_id]
    if len(stop_ids) == 1:
        return [*stop_ids]
    names = ", ".join(repr(tokenizer.decode([i])) for i in stop_ids)
    raise InputError(
        where,
        "has none of the tokens that end a completion",
        f"write one of {names} at its end, or set rollout.stop to one of them",
    )


def learned_length(part: list[int], stop_ids: tuple[int, ...], tokenizer: Tokenizer, where: str) -> int:
    """Number of learned tokens of an assistant turn: up to and including the first stop token.

    Text that a template writes after it (a line end) is never sampled.
    """
    if not stop_ids:
        return len(part)
    length = next((i + 1 for i, token in enumerate(part) if token in stop_ids), None)
    if length is None:
        raise InputError(
            where,
            f"no token ends the turn in the chat template, whose end is {tokenizer.decode(part[-3:])!r}: the policy "
            "would learn never to stop",
            "add the token that ends it to rollout.stop",
        )
    rest = tokenizer.decode(token for token in part[length:] if token not in stop_ids)
    if rest.strip():
        raise InputError(
            where,
            f"{tokenizer.decode(part[length - 1 : length])!r} ends a completion (rollout.stop), and "
            f"{rest.strip()[:20]!r} follows it",
            "remove one of them",
        )
    return length


def digest(rows: Sequence[Row]) -> str:
    """Checksum of the rows' token ids and learned tokens; it changes with the file, template and tokenizer."""
    checksum = hashlib.sha256()
    for row in rows:
        checksum.update(repr((len(row.token_ids), row.learned)).encode() + array("i", row.token_ids).tobytes())
    return checksum.hexdigest()[:16]
