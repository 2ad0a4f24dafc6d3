"""Compares made-up measurements of steps with their plans; started by run_ranks.

Usage: compare_job.py CASES ; JSON of {name: [settings, fields of `Measured`]}. Prints what was compared, and the plan.
"""

from __future__ import annotations

import json
import sys

from composed import composed

from grpo_mega import platform

platform.start_planning()

from grpo_mega.forecast.planning.compare import Measured, compare  # noqa: E402
from grpo_mega.forecast.planning.hours import hours  # noqa: E402
from grpo_mega.forecast.planning.lines import of_the_trainer  # noqa: E402
from grpo_mega.forecast.planning.plan import plan  # noqa: E402
from grpo_mega.forecast.planning.time import Assumed  # noqa: E402

results = {}
for name, (words, measured) in json.loads(sys.argv[1]).items():
    config = composed(*words)
    try:
        compared = compare(config, Measured(**measured))
    except ValueError as error:
        results[name] = {"error": str(error)}
        continue
    planned = plan(config)
    results[name] = compared | {
        "kinds": (hours(config, planned, Assumed(min(300.0, config.rollout.max_new_tokens / 2), 100)) or {})["kinds"],
        "trainer": max(map(of_the_trainer, planned["memory"])),
        "total": max(planned["total"]),
    }
print(json.dumps(results))
