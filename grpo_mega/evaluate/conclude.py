"""End of an evaluation: writes the results into its folder and formats them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grpo_mega.evaluate import results
from grpo_mega.evaluate.continuing import CONTINUES
from grpo_mega.evaluate.estimates import Estimate
from grpo_mega.evaluate.measure import by_task, measure, unscorable_in
from grpo_mega.evaluate.results import RESULTS
from grpo_mega.evaluate.show import draw, draw_budgets, table
from grpo_mega.evaluate.subject import Subject
from grpo_mega.evaluate.votes import ballot_of
from grpo_mega.observe.columns import shorten

SHOWN = 200
"""Characters of a problem that are shown."""


def conclude(folder: Path, made: Subject, settings: dict[str, Any]) -> None:
    """Writes samples.jsonl, curves.png and, last, results.json."""
    records = results.collect(folder, made.prompts)
    groups, votes = results.groups_of(made.prompts, records)
    votable = ballot_of(made.config.reward) and CONTINUES not in settings
    success, cast = made.config.reward.success, votes if votable else None
    within = results.within_of(records, settings.get("budgets", ()))
    overall = measure(groups, cast, success, within)
    if made.config.eval.samples > 1:
        draw(overall, folder / results.CURVES, made.name)
    if within:
        draw_budgets(overall, settings["sampling"]["max_new_tokens"], folder / results.BUDGETS, made.name)
    tasks = by_task(groups, cast, success, within)
    found = {"of": made.name, "unscorable": unscorable_in(groups), "all": overall, "tasks": tasks}
    results.write_results(folder, found | {"settings": settings})


def shown(folder: Path, made: Subject, settings: dict[str, Any]) -> str:
    """Results of the folder as text."""
    found = json.loads((folder / RESULTS).read_text())
    columns = {"all": found["all"]} | (found["tasks"] if len(found["tasks"]) > 1 else {})
    estimates = {title: {n: Estimate(**e) for n, e in column.items()} for title, column in columns.items()}
    sampling = settings["sampling"]
    title = (
        f"{made.name}: {len(made.prompts)} problems x {settings['samples']} samples, temperature "
        f"{sampling['temperature']:g}, top-p {sampling['top_p']:g}, up to {sampling['max_new_tokens']} tokens"
        f"{', by SGLang' if 'engine' in settings else ''}\n"
        f"asked, for example: {shorten(made.prompts[0].text, SHOWN)!r}"
    )
    unscorable = f"\n{found['unscorable']} samples could not be scored" if found["unscorable"] else ""
    return f"{title}\n\n{table(estimates)}{unscorable}\n\nmeans with 95 % intervals; everything is in {folder}"
