"""Writes a report about a run, or one that compares several: a single HTML file that opens from disk, anywhere.

    python tools/report.py runs/tiny
    python tools/report.py runs/tiny runs/seed1 --out comparison.html

    python tools/report.py runs/tiny --serve

The report of one run is written to RUN/report.html, unless --out names another file. A run directory that is
incomplete, or still being written, is shown as it is: the report and this command say what is missing, and which lines
cannot be read. With --serve nothing is written: the printed address shows the current state of the runs, with new steps
as they come, to browsers on this machine. From another machine: ssh -L 8265:127.0.0.1:8265 HOST, with --port 8265.

Exit code: 0 written, or served until Ctrl-C; 2 a folder is not a run directory, the file cannot be written, or the port
is taken.
"""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import suppress
from pathlib import Path

from grpo_mega.errors import InputError
from grpo_mega.observe.foreign import tell
from grpo_mega.observe.run_dir import REPORT, naming
from grpo_mega.show.report.pack import SHOWN_NOTES
from grpo_mega.show.report.page import write_report
from grpo_mega.show.report.read import read_run
from grpo_mega.show.report.serve import Server

DONE, BAD_INPUT = 0, 2


def parser() -> argparse.ArgumentParser:
    """Parser of the options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    made.add_argument("--out", type=Path, metavar="FILE", help="what to write (RUN/report.html); needed for several")
    made.add_argument("--serve", action="store_true", help="show the runs to a browser on this machine until Ctrl-C")
    made.add_argument("--port", type=int, default=0, metavar="N", help="of --serve (a free one)")
    return made


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code."""
    options = parser().parse_args(arguments)
    try:
        if options.serve:
            return serve(options.runs, options.port)
        if len(options.runs) > 1 and options.out is None:
            raise InputError("--out", "several runs are compared in one file", "give --out FILE")
        out = options.out or options.runs[0] / REPORT
        with naming(f"a file of {' or '.join(map(str, options.runs))}"):
            runs = [read_run(path) for path in options.runs]
            write_report(runs, out)
    except (ValueError, OSError) as error:
        tell(f"error: {error}", sys.stderr)
        return BAD_INPUT
    for run in runs:
        for what in run.missing:
            tell(f"{run.path}: {what}", sys.stderr)
        for what in run.damaged[:SHOWN_NOTES]:
            tell(f"warning: {what}", sys.stderr)
        if more := len(run.damaged[SHOWN_NOTES:]) + run.damaged_more:
            tell(f"warning: {run.path}: {more} more that cannot be read", sys.stderr)
    tell(f"{out} ({out.stat().st_size / 1e6:.1f} MB)")
    return DONE


def serve(paths: list[Path], port: int) -> int:
    """Serves the report until Ctrl-C or SIGTERM; returns the exit code."""
    # SIGINT as well, because scripts start background processes with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    if not 0 <= port < 1 << 16:
        raise InputError(f"--port {port}", "not a port", "choose one up to 65535, or 0 for any that is free")
    with naming(f"a file of {' or '.join(map(str, paths))}"):
        server = Server(paths, port)
    with server:
        tell(f"{server.address} shows new steps as they come; Ctrl-C ends it")
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    return DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
