"""Describes files of problems, and writes them without duplicates and problems that are in a test set.

    python tools/data.py train.jsonl
    python tools/data.py gsm8k/main --prompt question --answer-pattern '#### (.*)' --tokenizer models/Qwen2.5-0.5B
    python tools/data.py train.parquet --against aime24.json math500.jsonl --unique --output clean.jsonl

Counts problems, the lengths of their texts, the kinds of their answers, rows that training would refuse, and repeated
problems (equal except for case and white space). `--against` searches for runs of 13 words shared with a test problem,
and shows the worst; `--near 0.8` also searches for problems that share four fifths of their runs of 5 words with an
earlier one that is kept (both in grpo_mega/recipes/curation/similar_texts.py). `--output` writes, as JSON Lines, the
rows that share no run with a test problem, with `--unique` only the first of equal and near ones; the file appears when
it is complete.

Files are read as for training (docs/data.md), a row at a time: memory is that of the test problems, and about two
hundred bytes for each row, five thousand with --near. Exit code: 0 done, 2 an input cannot be read.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

from grpo_mega.config.schema import SourceConfig
from grpo_mega.config.typed import as_meant
from grpo_mega.data.huggingface import HuggingFaceTokenizer
from grpo_mega.data.problems import asked_in, plain
from grpo_mega.data.records import records
from grpo_mega.errors import InputError
from grpo_mega.observe.launcher import end_with_code_of
from grpo_mega.platform.files import writing_atomic
from grpo_mega.recipes.curation.similar_texts import Grams, Near
from grpo_mega.recipes.curation.statistics import ProblemFilters, Statistics, examined, spread

DONE, BAD_INPUT = 0, 2


def parser() -> argparse.ArgumentParser:
    """Parser of the options."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("files", nargs="+", metavar="FILE", help="file or folder of problems")
    options.add_argument("--split", default="train", help="which files of a folder (train)")
    options.add_argument("--prompt", default="prompt", metavar="COLUMN", help="column of the problem (prompt)")
    options.add_argument("--answer", default="answer", metavar="COLUMN", help="column of the answer (answer)")
    options.add_argument(
        "--id",
        metavar="COLUMN",
        help="check that this column has a different text or number in every row of a file (not checked)",
    )
    options.add_argument("--answer-pattern", metavar="REGEX", help="its last match is the answer, or the group in it")
    options.add_argument("--tokenizer", metavar="FOLDER", help="count tokens as this Hugging Face model does")
    options.add_argument("--against", nargs="+", default=[], metavar="TEST", help="files or folders of test problems")
    options.add_argument("--test-split", default="test", metavar="SPLIT", help="which files of a folder of them (test)")
    options.add_argument("--test-prompt", metavar="COLUMN", help="column of the test problem (that of --prompt)")
    options.add_argument("--words", type=int, default=13, metavar="N", help="length of the runs of words to search for")
    options.add_argument(
        "--near", type=float, metavar="SHARE", help="search for near-duplicates: 0.5 (half in common) to 1"
    )
    options.add_argument("--unique", action="store_true", help="leave duplicates of earlier rows out of --output")
    options.add_argument("--output", type=Path, metavar="FILE.jsonl", help="where the clean rows go")
    options.add_argument("--json", action="store_true", help="print the numbers as JSON")
    return options


def test_problems(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """(where, text) of every test problem."""
    source = SourceConfig(prompt=options.test_prompt or options.prompt)
    for path in options.against:
        for record in records(path, options.test_split):
            yield record.where, plain(asked_in(record, source))


def filters_of(options: argparse.Namespace) -> ProblemFilters:
    """Checks to apply; reads the test problems."""
    tokenizer = HuggingFaceTokenizer(options.tokenizer, "{prompt}") if options.tokenizer else None
    return ProblemFilters(
        length=(lambda text: len(tokenizer.encode(text))) if tokenizer else None,
        tests=Grams(test_problems(options), options.words) if options.against else None,
        near=Near(options.near) if options.near is not None else None,
        unique=options.unique,
    )


def counted(options: argparse.Namespace) -> Statistics:
    """Reads everything once, and writes the clean rows."""
    if options.output and options.output.suffix != ".jsonl":
        raise InputError(f"--output {options.output}", "not a name for JSON Lines", "give it the ending .jsonl")
    if options.unique and not options.output:
        raise InputError("--unique", "has no effect without --output", "give --output FILE.jsonl, or leave it out")
    if options.words < 1:
        raise InputError(f"--words {options.words}", "too few", "choose 1 or more")
    try:
        re.compile(options.answer_pattern or "")
    except re.error as error:
        where = f"--answer-pattern {options.answer_pattern!r}"
        raise InputError(where, f"not a regular expression: {error}", "correct it") from error
    source = SourceConfig(
        prompt=options.prompt, answer=options.answer, answer_pattern=options.answer_pattern, id=options.id
    )
    filters, statistics = filters_of(options), Statistics()
    rows = examined((records(path, options.split) for path in options.files), source, statistics, filters)
    # Rows are counted as they pass, so the loop is needed even if nothing is written.
    with writing_atomic(options.output) if options.output else nullcontext() as file:
        for row in rows:
            if file:
                file.write(json.dumps(row.fields, ensure_ascii=False, default=str).encode() + b"\n")
    return statistics


def show(statistics: Statistics, options: argparse.Namespace) -> None:
    """Prints the statistics."""
    print(f"{statistics.rows:,} rows, {statistics.unusable:,} of them unusable (--dry-run tries the reward on them)")
    for reason in statistics.reasons:
        print(f"  {reason}")
    for name in ("characters", "tokens"):
        if lengths := getattr(statistics, name):
            of = spread(lengths)
            print(f"{name}: {of['min']:,} to {of['max']:,}, half at most {of['median']:,}, 99 % at most {of['p99']:,}")
    print("answers: " + ", ".join(f"{number:,} {kind}" for kind, number in statistics.answers.most_common()))
    print(f"{statistics.repeated:,} rows have a problem that an earlier row has")
    if options.near is not None:
        print(f"{statistics.near:,} more have most of an earlier row's")
        for share, row, earlier, text in statistics.near_pairs:
            print(f"  {share:4.0%} alike: {row} and {earlier}: {text!r}")
    if options.against:
        print(f"{statistics.contaminated:,} rows share a run of {options.words} words with a test problem")
        for share, row, test, text in statistics.worst:
            print(f"  {share:4.0%} of {test} in {row}: {text!r}")
    if options.output:
        print(f"{statistics.written:,} rows written to {options.output}")


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code."""
    options = parser().parse_args(as_meant(arguments))
    try:
        statistics = counted(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    if options.json:
        print(json.dumps(statistics.as_json(), ensure_ascii=False))
    else:
        show(statistics, options)
    return DONE


if __name__ == "__main__":
    end_with_code_of(main)
