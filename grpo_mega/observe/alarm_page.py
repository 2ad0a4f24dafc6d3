"""Prints docs/alarms.md, made of the table: `python -m grpo_mega.observe.alarm_page > docs/alarms.md`."""

from __future__ import annotations

from grpo_mega.config.schema import AlarmsConfig
from grpo_mega.observe.alarm_log import QUIET
from grpo_mega.observe.alarms import ALARMS, Alarm

HEAD = f"""# Alarms

A run checks these after every step of its last stage. Generated from `grpo_mega/observe/alarms.py` by
`python -m grpo_mega.observe.alarm_page`.

An alarm that rises is a line on the console and in `alarms.jsonl` of the run directory; another line says when it is
over, after {QUIET} steps in a row without its condition. `summary.json` lists all that rose. Means and medians are over
the latest steps that have the metric ([metrics.md](metrics.md)); an alarm waits until there are that many.

`alarms.NAME=NUMBER` sets a threshold, `alarms.NAME=null` turns the alarm off. Both may change between starts.

`run.stop_on=[NAME, ...]`, or `[any]`, stops a run whose alarm is up, unless the step is its last. The run saves a
checkpoint, `summary.json` has `"status": "stopped"` and the name in `"stopped_by"`, and every rank ends with exit code
4, as does a Slurm job, which is not requeued. The same command stops again at once, until you change `run.stop_on` or
the threshold.

| alarm | threshold | rises when |
| --- | --- | --- |
"""


def page() -> str:
    """Returns docs/alarms.md."""
    limits = AlarmsConfig()
    rows = "".join(
        f"| [{alarm.name}](#{alarm.name}) | `alarms.{alarm.name}={getattr(limits, alarm.name)}` | {alarm.condition} |\n"
        for alarm in ALARMS
    )
    return HEAD + rows + "".join(section(alarm) for alarm in ALARMS)


def section(alarm: Alarm) -> str:
    """Returns the section about an alarm."""
    return f"\n## {alarm.name}\n\n{alarm.means}\n\nWhat to do: {alarm.action}\n"


if __name__ == "__main__":
    print(page(), end="")
