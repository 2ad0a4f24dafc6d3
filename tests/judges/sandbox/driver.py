"""Runs programs in a sandbox of its own, for tests that need one of another user: JSON lines in, JSON lines out."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from grpo_mega.judges.sandbox import BoxCall, Limits, Sandbox


def answer(sandbox: Sandbox, asked: dict[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {
        "stdin": asked.get("stdin", "").encode(),
        "limits": Limits(**asked.get("limits", {})),
        "files": {name: content.encode() for name, content in asked.get("files", {}).items()},
    }
    if "argv" in asked:
        outcome = sandbox.run(asked["argv"], **given)
    else:
        call = BoxCall(*asked["call"]) if "call" in asked else None
        outcome = sandbox.python(asked["source"], call=call, **given)
    return {key: v.decode(errors="replace") if isinstance(v, bytes) else v for key, v in asdict(outcome).items()}


if __name__ == "__main__":
    with_boxes = Sandbox(boxes=1, mechanism=sys.argv[1])  # type: ignore[arg-type]
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(with_boxes, json.loads(line))), flush=True)
