"""Prints docs/alarms.md, made of the table: `python -m grpo_mega.observe.alarm_page > docs/alarms.md`."""

from __future__ import annotations

from grpo_mega.config.schema import AlarmsConfig
from grpo_mega.observe.alarm_log import QUIET
from grpo_mega.observe.alarms import ALARMS, Alarm

HEAD = f"""# Alarms

What a run looks at after every step, and what to do when it says so. This page is made of `grpo_mega/observe/alarms.py`
by `python -m grpo_mega.observe.alarm_page`; a test compares them.

An alarm that rises is a line on the console and in `alarms.jsonl` of the run directory, another one says when it is
over: after {QUIET} steps in a row without its condition. `summary.json` lists all that rose. Means and medians are over
the latest steps that have the metric ([metrics.md](metrics.md)); nothing rises before there are as many. Alarms belong
to the last stage of a run, the one that writes `metrics.jsonl`.

`alarms.NAME=NUMBER` is the threshold of an alarm, `alarms.NAME=null` turns it off. Both may change between starts.

`run.stop_on=[NAME, ...]`, or `[any]`, stops the run when such an alarm is up: after the step a checkpoint is saved,
`summary.json` has `"status": "stopped"` and the name in `"stopped_by"`, and every rank ends with exit code 4. A Slurm
job ends with code 4 too, and is not put back into the queue. The same command stops again at once, until `run.stop_on`
does not name the alarm, or the threshold is another one. The last step of a run is not stopped: it is measured.

No alarm is about answers that were aborted: no step has any. Weights are replaced only while no sample is under way, a
sample that an engine gives up is an error, and what a signal interrupts is sampled anew. Steps learn from tokens of
earlier weights only where samples outlive steps ([rollout.md](rollout.md)): `staleness` and `correction` are for those.

| alarm | threshold | rises when |
| --- | --- | --- |
"""


def page() -> str:
    """Returns docs/alarms.md."""
    rows = "".join(f"| [{alarm.name}](#{alarm.name}) | {_default(alarm)} | {alarm.condition} |\n" for alarm in ALARMS)
    return HEAD + rows + "".join(section(alarm) for alarm in ALARMS)


def section(alarm: Alarm) -> str:
    """Returns the section about an alarm."""
    return f"\n## {alarm.name}\n\n{alarm.means}\n\nWhat to do: {alarm.action}\n"


def _default(alarm: Alarm) -> str:
    return f"`alarms.{alarm.name}={getattr(AlarmsConfig(), alarm.name)}`"


if __name__ == "__main__":
    print(page(), end="")
