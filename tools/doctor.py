"""Checks whether this machine can train, with a command for everything that needs a fix.

    python tools/doctor.py                        on a laptop, a login node or a GPU node
    srun --ntasks-per-node=1 python tools/doctor.py --runs /shared/runs --json

It checks driver, CUDA, NCCL, torch, megatron-core and the other packages, Transformer Engine, Apex, flash-attn-4,
SGLang, torch_memory_saver, shared and main memory, limits and the filesystem of the run directories. It needs only
Python.

Exit code: 0 no check failed, 1 a check failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036  the user may have an older one
    sys.exit(f"error: this is Python {sys.version.split()[0]}, and 3.11 or newer is needed: make PYTHON=python3.11")
# The doctor must also run where nothing is installed, this project included.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from grpo_mega.forecast.doctor import examine
from grpo_mega.forecast.doctor.finding import ABSENT, FAILURE, OK, WARNING, Finding

COLORS = {OK: 32, ABSENT: 90, WARNING: 33, FAILURE: 31}


def show(findings: Iterable[Finding]) -> list[Finding]:
    """Prints findings as text as they arrive, and returns them."""
    shown = []
    for finding in findings:
        verdict = f"{finding.verdict:<8}"
        if sys.stdout.isatty():
            verdict = f"\x1b[{COLORS[finding.verdict]}m{verdict}\x1b[0m"
        print(f"{verdict} {finding.name:<20} {finding.found}" + (f": {finding.why}" if finding.why else ""))
        if finding.fix:
            print(f"{'':<9}{'':<20} {finding.fix}")
        shown.append(finding)
    return shown


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="the folder for run directories (runs)")
    parser.add_argument("--json", action="store_true", help="print a JSON document instead")
    options = parser.parse_args(arguments)
    findings = list(examine(options.runs)) if options.json else show(examine(options.runs))
    failures = [finding.name for finding in findings if finding.verdict == FAILURE]
    if options.json:
        print(json.dumps({"fit": not failures, "findings": [asdict(finding) for finding in findings]}))
    else:
        print(f"\nnot fit to train: {', '.join(failures)}" if failures else "\nfit to train")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
