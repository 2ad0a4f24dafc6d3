"""Starts tools/evaluate.py, and reads what it writes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from forks import REPOSITORY, Fork, Program, run_python, start

TOOL = str(REPOSITORY / "tools" / "evaluate.py")


def evaluate(
    *words: object, ranks: int = 0, environment: dict[str, str] | None = None, code: int = 0, trusts: bool = True
) -> str:
    """What the tool prints, on `ranks` processes, or as a plain process with 0."""
    done = run_python(
        TOOL, *words, *(["--trust-run"] if trusts else []), ranks=ranks, environment=_environment(environment or {})
    )
    assert done.returncode == code, done.stdout + done.stderr[-3000:]
    return done.stdout + done.stderr


def begun(log: Path, *words: object, environment: dict[str, str]) -> Fork:
    """The tool as a plain process that has just begun; what it prints goes to a file."""
    own = os.environ | _environment(environment)
    (fork,) = start(Program([TOOL, *map(str, words), "--trust-run"], os.getcwd(), own, str(log), str(log)))
    return fork


def _environment(given: dict[str, str]) -> dict[str, str]:
    rooms = (REPOSITORY, REPOSITORY / "kernels", REPOSITORY / "tests" / "train")
    path = os.pathsep.join([*map(str, rooms), *filter(None, [given.get("PYTHONPATH")])])
    return given | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def results(folder: Path) -> dict[str, Any]:
    """results.json."""
    return json.loads((folder / "results.json").read_text())


def samples(folder: Path) -> list[dict[str, Any]]:
    """The lines of samples.jsonl."""
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
