"""Prints docs/metrics.md, made of the table: `python -m grpo_mega.observe.metric_page > docs/metrics.md`."""

from __future__ import annotations

from grpo_mega.observe.metric_table import ROOMS, Metric, Room

HEAD = """# Metrics

Every number that a run writes at every step, into metrics.jsonl (earlier stages: files of their own) and TensorBoard.
This page is made of `grpo_mega/observe/metric_table.py` by `python -m grpo_mega.observe.metric_page`; a test compares
them.

In names, `{term}` stands for a term of the reward, `{task}` for a task, `{k}` for a number. A share is from 0 to 1; a
pure number has no unit. ↑ is better higher, ↓ better lower, each for itself and not at any price. A value that is not
finite is null in the file, with a warning.

The console shows those that say most. On a terminal they stand in a panel, each with its course since the stage began
or was continued, below two bars: how far the run (or an earlier stage) is, and the phase that runs now, both with the
time that is left, as far as other steps or the samples that are there tell. Above it rows of a table and all else that
is said scroll by. In a file, and wherever else there is no terminal, a step is one line, and a phase that lasts says so
once a minute.
"""
ARROWS = {"up": "↑", "down": "↓", "": ""}


def page() -> str:
    """Returns docs/metrics.md."""
    return "\n".join([HEAD, *(section(room) for room in ROOMS)])


def section(room: Room) -> str:
    """Returns the section about a room."""
    rows = [row(room.prefixes[0], metric) for metric in room.metrics]
    table = ["| metric | unit | | definition | taken |", "| --- | --- | --- | --- | --- |", *rows]
    return "\n".join([f"## {room.title}", "", room.about, "", *table, ""])


def row(prefix: str, metric: Metric) -> str:
    """Returns the table's row of a metric."""
    meaning, taken = (text.replace("|", r"\|") for text in (metric.meaning, metric.taken))
    return f"| `{prefix}{metric.name}` | {metric.unit} | {ARROWS[metric.good]} | {meaning} | {taken} |"


if __name__ == "__main__":
    print(page(), end="")
