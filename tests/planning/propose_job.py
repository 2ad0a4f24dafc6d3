"""Proposes layouts for published models, and plans what would have been cheaper."""

from __future__ import annotations

import json
import sys

from grpo_mega import platform
from grpo_mega.config.load import compose_config

platform.start_planning()

from grpo_mega.planning.plan import plan  # noqa: E402
from grpo_mega.planning.propose import candidates, differing, propose  # noqa: E402

results = {}
for case, words in json.loads(sys.argv[1]).items():
    config = compose_config(words)
    try:
        proposed = propose(config)
    except ValueError as error:
        results[case] = {"error": str(error)}
        continue
    planned, cheaper = plan(proposed), []
    for candidate in candidates(proposed):
        if candidate.layout == proposed.layout:
            break
        cheaper.append(candidate)
    results[case] = {
        "fits": [planned["fits"], planned["engine"] is None or planned["engine"]["fits"]],
        "gpus": planned["gpus"],
        "layout": planned["layout"],
        "cheaper": [plan(candidate)["fits"] for candidate in cheaper[-3:]],
        "settings": dict(differing(config, proposed)),
    }
print(json.dumps(results))
