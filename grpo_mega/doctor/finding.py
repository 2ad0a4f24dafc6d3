"""What an examination finds, and how things are looked at that may crash or hang."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

SECONDS = 120
"""How long an import or a command may take."""

OK, ABSENT, WARNING, FAILURE = "ok", "absent", "warning", "failure"
"""Verdicts: fine; not there and not needed here; works worse than it could; training will fail."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: what was found, a verdict, and for those that are not fine why, and a command."""

    name: str
    found: str
    verdict: str = OK
    why: str = ""
    fix: str = ""


def run(command: list[str]) -> tuple[str, str]:
    """What a command prints, and what is wrong with it: its last words, "" when it ends well."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return "", f"no answer in {SECONDS} s"
    except OSError as error:
        return "", str(error)
    if done.returncode == 0:
        return done.stdout, ""
    last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
    return done.stdout, f"ended by signal {-done.returncode}" if done.returncode < 0 else last


def in_words(size: int) -> str:
    """A size in bytes, for people."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
