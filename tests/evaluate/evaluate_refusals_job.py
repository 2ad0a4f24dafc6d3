"""Asks for what is finished, and for what cannot be evaluated; started by run_ranks.

Usage: evaluate_refusals_job.py RUN FOLDER SCRATCH, of a run that was evaluated. Prints, as JSON, what each is told.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

from ranks import REPOSITORY

from grpo_mega import platform

HERE = platform.start()

from grpo_mega.evaluate.subject import Asked, subject  # noqa: E402


def refusal(path: Path, *settings: str, data: tuple[str, ...] = (), reward: str | None = None) -> str:
    try:
        subject(path, Asked(data, None, reward, settings, None, None, trusts=True), 1)
    except (ValueError, FileNotFoundError) as error:
        return str(error)
    return "accepted"


def told(*words: object) -> str:
    """What tools/evaluate.py says, in this process."""
    spec = importlib.util.spec_from_file_location("evaluate_tool", REPOSITORY / "tools" / "evaluate.py")
    assert spec
    assert spec.loader
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    try:
        return tool.evaluate(tool.parse([*map(str, words), "--trust-run"]), HERE)
    except ValueError as error:
        return str(error)


if __name__ == "__main__":
    platform.join_processes(HERE)
    run, folder, scratch = map(Path, sys.argv[1:])
    sums = scratch / "sums.jsonl"
    sums.write_text("".join(json.dumps({"prompt": f"{i}+5=?", "answer": i + 5}) + "\n" for i in range(3)))
    bare = scratch / "bare"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    own = run / "evaluations" / "step-000002"
    terms = "reward.terms=[{name: accuracy, tasks: [sums]}]"
    said = {
        "no data": refusal(folder),
        "no training problems": told(run, "--train", 0),
        "two kinds of problems": told(run, "--train", 2, "--data", sums),
        "no tokenizer": refusal(bare, data=(str(sums),)),
        "no such reward": refusal(folder, data=(str(sums),), reward="best"),
        "reward as a group": refusal(run, "reward=boxed"),
        "layout as a group": refusal(run, "layout=tp2"),
        "no samples": refusal(run, "eval.samples=0"),
        "too many at once": refusal(run, "eval.samples=16", "rollout.concurrent_sequences=4"),
        "no reward": refusal(run, terms, "reward.success=accuracy", data=(f"other={sums}",)),
        "same ids": refusal(run, data=(str(sums), str(sums))),
        "another model": refusal(run, "model.layers=3"),
        "nothing there": refusal(scratch / "absent"),
        "finished": told(run, "--samples", 4, "--budgets", 3, 8),
        "other settings": told(run, "--samples", 2, "--temperature", 0.5, "--budgets", 3, 8),
        "budget of all": told(run, "--samples", 4, "--budgets", 8, 16),
        "separators alone": told(run, "--separators", ";"),
        "no place": told(run, "--continue", own),
        "no environment": told(run, "--continue", own, "--out", scratch / "none", "environment.path=a:B"),
        "other problems": told(run, "--train", 2, "--continue", own, "--out", scratch / "none"),
        "no steps": told(run, "--continue", own, "--separators", 99 * "9", "--out", scratch / "none"),
        "a reward model beside engines": told(run, f"reward.model.path={run}", "rollout.engine=sglang"),
        "no tokens": told(run, "--samples", 4, "--budgets", 0),
    }
    print(json.dumps(said))
