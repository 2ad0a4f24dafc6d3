"""The result of one check, and a way to run commands that may crash or hang."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

SECONDS = 120
"""Time limit of an import or a command, in seconds."""

OK, ABSENT, WARNING, FAILURE = "ok", "absent", "warning", "failure"
"""Verdicts: fine; missing and not needed here; degraded; training will fail."""


@dataclass(frozen=True)
class Finding:
    """The result of one check: its name, what was found, a verdict and, unless that is ok, the reason and a command."""

    name: str
    found: str
    verdict: str = OK
    why: str = ""
    fix: str = ""


def run(command: list[str]) -> tuple[str, str]:
    """Runs a command; returns its standard output and, if it fails, the last line of its output (else "")."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return "", f"no answer in {SECONDS} s"
    except OSError as error:
        return "", str(error)
    if done.returncode == 0:
        return done.stdout, ""
    # The last line of a traceback names the exception. A process that a signal ends, such as an import that crashes,
    # often leaves no message, so the signal is reported instead.
    last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
    return done.stdout, f"ended by signal {-done.returncode}" if done.returncode < 0 else last


def binary_size(size: int) -> str:
    """A size in bytes as text, in GiB or MiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
