"""Proposes layouts for published models, and plans what would have been faster."""

from __future__ import annotations

import json
import sys

from composed import composed

from grpo_mega import platform

platform.start_planning()

from grpo_mega.forecast.planning.choice import NEAR, propose, search  # noqa: E402
from grpo_mega.forecast.planning.plan import plan  # noqa: E402
from grpo_mega.forecast.planning.search import differing, ranked  # noqa: E402
from grpo_mega.forecast.planning.time import Assumed  # noqa: E402

results = {}
for case, words in json.loads(sys.argv[1]).items():
    config = composed(*words)
    try:
        proposed = propose(config)
    except ValueError as error:
        results[case] = {"error": str(error)}
        continue
    planned = plan(proposed)
    found = ranked(config, Assumed())
    [taken] = [candidate for candidate in found if candidate.config.layout == proposed.layout]
    faster = [candidate for candidate in found if candidate.seconds < taken.seconds / (1 + NEAR)]
    results[case] = {
        "fits": [planned["fits"], planned["engine"] is None or planned["engine"]["fits"]],
        "gpus": planned["gpus"],
        "layout": planned["layout"],
        "faster": [plan(candidate.config)["fits"] for candidate in faster[-3:]],
        "seconds": [candidate.seconds for candidate in found],
        "counted": [candidate.bytes for candidate in found if candidate.config.layout == proposed.layout],
        "built": max(planned["total"]),
        "settings": dict(differing(config, proposed)),
        "search": search(config, Assumed()),
    }
print(json.dumps(results))
