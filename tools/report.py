"""Writes a page about a run, or one that compares several: a single HTML file that opens from disk, anywhere.

    python tools/report.py runs/tiny
    python tools/report.py runs/tiny runs/seed1 --out comparison.html

Of one run it goes to RUN/report.html, unless --out names another file. A run directory that is not whole, or still
being written, is shown as it is: the page and this command say what is missing, and which lines cannot be read.

Exit code: 0 written, 2 a folder is no run directory, or the file cannot be written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from grpo_mega.observe.run_dir import REPORT
from grpo_mega.report.page import write_report
from grpo_mega.report.read import read_run

DONE, BAD_INPUT = 0, 2


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    made.add_argument("--out", type=Path, metavar="FILE", help="what to write (RUN/report.html); needed for several")
    return made


def main(arguments: list[str]) -> int:
    """The command; returns its exit code."""
    options = parser().parse_args(arguments)
    try:
        if len(options.runs) > 1 and options.out is None:
            raise ValueError("several runs are compared in one file: name it with --out FILE")
        runs = [read_run(path) for path in options.runs]
        out = options.out or options.runs[0] / REPORT
        write_report(runs, out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    for run in runs:
        for what in run.missing:
            print(f"{run.path}: {what}", file=sys.stderr)
        for what in run.damaged:
            print(f"warning: {what}", file=sys.stderr)
    print(f"{out} ({out.stat().st_size / 1e6:.1f} MB)")
    return DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
