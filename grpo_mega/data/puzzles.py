"""Problems that the library reasoning-gym makes up (Stojanovski et al., 2025, arXiv 2505.24760), as rows of a source.

An item is a function of the task, its settings, a seed and its number, so every rank and every later start makes the
same problems, whatever the run's seed. The library is imported only when a source asks for it.
"""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from grpo_mega.config.puzzles import check_installed
from grpo_mega.config.schema import SourceConfig
from grpo_mega.data.overlap import normalised
from grpo_mega.data.records import Record

COLUMN = "reasoning_gym"
"""Column, and key of a prompt's metadata, of what the task's scorer reads."""
AS_MADE = SourceConfig(metadata=[COLUMN])
"""The columns of the rows."""
TESTED, TRAINED = 0, 1 << 30
"""Seeds of the held-out problems and of the training problems. Most tasks make item k from seed + k, so seeds that are
near each other have the same items."""
TRIES = 20
"""Items that are made for each problem that is needed, at most; the others were there already."""


def puzzles(source: SourceConfig, field: str) -> tuple[list[Record], list[Record]]:
    """The training problems of a source and its held-out problems, all of them different.

    How many are trained on does not change which are held out.

    Args:
        source: Its task, settings and numbers of problems.
        field: The source's field, for messages.

    Raises:
        ValueError: The library is missing or another release, the task does not take the settings, fails to make an
            item with them, or has fewer different problems.
    """
    try:
        check_installed()
    except ValueError as error:
        raise ValueError(f"{field}.reasoning_gym={source.reasoning_gym}: {error}") from error
    seen: set[str] = set()
    with redirect_stdout(StringIO()):  # some tasks print
        tested = _different(source, TESTED, source.test_problems, seen, f"{field}.test_problems")
        return _different(source, TRAINED, source.problems, seen, f"{field}.problems"), tested


def _different(source: SourceConfig, seed: int, wanted: int, seen: set[str], field: str) -> list[Record]:
    """As many items as the `field` wants, whose problems are not yet `seen` in any case or spacing."""
    task = str(source.reasoning_gym)
    room = field.rpartition(".")[0]
    items = _items(task, source.options | {"seed": seed, "size": TRIES * wanted}, room) if wanted else ()
    made: list[Record] = []
    for k in range(TRIES * wanted):
        if len(made) == wanted:
            break
        try:
            record = _record(task, seed + k, items[k])
        except Exception as error:  # some settings fail only now
            raise ValueError(
                f"{room}.options={source.options}: {task} cannot make item {seed + k} with them: {error!r}; "
                "choose others"
            ) from error
        wording = normalised(record.fields["prompt"])
        if wording not in seen:
            seen.add(wording)
            made.append(record)
    if len(made) < wanted:
        raise ValueError(
            f"{field}={wanted}: {TRIES * wanted} items of {task} have only {len(made)} more problems that differ; "
            f"choose at most as many, or {room}.options with which there are more"
        )
    return made


def _items(task: str, options: dict[str, Any], field: str) -> Any:
    """The task's items, by their number."""
    import reasoning_gym  # not needed for other sources, and so no dependency

    try:
        return reasoning_gym.create_dataset(task, **options)
    except Exception as error:  # settings are checked by constructors and assertions
        raise ValueError(f"{field}.options: {task} does not take them: {error}") from error


def _record(task: str, number: int, item: dict[str, Any]) -> Record:
    """An item as a row; the entry as JSON has it, because that is what the scorer will get."""
    entry = json.loads(json.dumps({name: item[name] for name in ("question", "answer", "metadata")}))
    fields = {"prompt": item["question"], "answer": item["answer"], COLUMN: {"task": task, "entry": entry}}
    return Record(f"reasoning-gym {task}, item {number}", f"{task}/{number}", fields)
