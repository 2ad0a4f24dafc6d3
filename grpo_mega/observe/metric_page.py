"""Prints docs/metrics.md, made of the table: `python -m grpo_mega.observe.metric_page > docs/metrics.md`."""

from __future__ import annotations

from grpo_mega.observe.metric_table import SECTIONS, Metric, MetricSection

HEAD = """# Metrics

Every number that a run writes at every step, to metrics.jsonl (earlier stages: separate files) and TensorBoard.
Generated from `grpo_mega/observe/metric_table.py` by `python -m grpo_mega.observe.metric_page`.

In names, `{term}` stands for a term of the reward, `{task}` for a task, `{k}` for a number. A share is from 0 to 1. ↑
means that higher is better, ↓ lower. A value that is not finite is null in the file, with a warning. Except for times
and machines, the numbers are the same under every layout: exactly for rewards, lengths and evaluations, else up to
rounding.

On a terminal, the console shows the main metrics with their curves, below progress bars of the run and the current
phase with the time left; rows of a table and messages scroll by above. Elsewhere, as in a file, a step is one line, and
a long phase reports once a minute.
"""
ARROWS = {"up": "↑", "down": "↓", "": ""}


def page() -> str:
    """Returns docs/metrics.md."""
    return "\n".join([HEAD, *(table(section) for section in SECTIONS)])


def table(section: MetricSection) -> str:
    """Returns the title, text and table of a section; metrics that an earlier section shares are only named."""
    shared = [metric for earlier in SECTIONS[: SECTIONS.index(section)] for metric in earlier.metrics]
    rows = [row(section.prefixes[0], metric) for metric in section.metrics if metric not in shared]
    head = [f"## {section.title}", "", section.about, ""]
    if rows:
        head += ["| metric | unit | | definition | taken |", "| --- | --- | --- | --- | --- |", *rows, ""]
    if same := ", ".join(f"`{section.prefixes[0]}{metric.name}`" for metric in section.metrics if metric in shared):
        head += [f"Defined as in earlier sections: {same}.", ""]
    return "\n".join(head)


def row(prefix: str, metric: Metric) -> str:
    """Returns the table's row of a metric."""
    meaning, taken = (text.replace("|", r"\|") for text in (metric.meaning, metric.taken))
    return f"| `{prefix}{metric.name}` | {metric.unit} | {ARROWS[metric.good]} | {meaning} | {taken} |"


if __name__ == "__main__":
    print(page(), end="")
