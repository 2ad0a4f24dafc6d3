"""Runs tools/rehearse.py, where there is an environment for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from limits import limit
from ranks import REPOSITORY

from grpo_mega.forecast.rehearsal.job import Environment, NoEnvironment


def _why_not() -> str:
    try:
        Environment.find(REPOSITORY)
    except NoEnvironment as error:
        return str(error)
    return ""


needs_environment = pytest.mark.skipif(bool(_why_not()), reason=_why_not())


def rehearse(folder: Path, code: int, *arguments: str) -> dict[str, Any]:
    """What the command writes with `--out`, and prints as "text"; it must end with this code."""
    out = folder / "rehearsed.json"
    command = [sys.executable, "tools/rehearse.py", *arguments, "--out", str(out)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=limit(900))
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    print(done.stdout)
    return json.loads(out.read_text()) | {"text": done.stdout}
