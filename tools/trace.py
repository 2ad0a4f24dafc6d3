"""Joins the traces of a run's ranks into one file for Perfetto, and shows where the time of a step goes.

    python tools/trace.py runs/tiny
    python tools/trace.py runs/tiny --steps 3:5 --out slow.json
    python tools/trace.py runs/tiny --last
    python tools/trace.py runs/tiny --cost

https://ui.perfetto.dev opens the file, RUN/trace/joined.json.gz without --out; a name that ends in .gz is compressed.
--last writes nothing: it shows the last events of each rank, which exist after any end of the run; --before shows those
of the start before the newest one, e.g. of a job that was restarted. --cost writes nothing either: it measures the time
of an event on this machine, and shows which share of the run's steps recording took.

Exit code: 0 done, 2 the run has no such trace, or the file cannot be written.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time_ns

from grpo_mega.config.derived import read_steps
from grpo_mega.errors import InputError
from grpo_mega.observe.foreign import tell
from grpo_mega.observe.launcher import end_with_code_of
from grpo_mega.observe.logs import last_error
from grpo_mega.observe.run_dir import naming
from grpo_mega.platform.clock import own_clock
from grpo_mega.platform.flight import BEFORE, Moment
from grpo_mega.platform.flight import FOLDER as FLIGHT
from grpo_mega.platform.trace import FOLDER as TRACE
from grpo_mega.platform.trace import Process, Trace, phase, recording, span
from grpo_mega.show.traces.trace_files import RankTrace, join, moments_in, read_traces, steps_of
from grpo_mega.show.traces.waterfall import Waterfall, waits, waterfall

DONE, BAD_INPUT = 0, 2
EVENTS = 10_000
"""Number of events recorded to measure the cost of one; fewer than a step may have."""
MOMENTS = 8
"""Number of events of each rank that --last shows."""


def parser() -> argparse.ArgumentParser:
    """Parser of the options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    made.add_argument("--steps", metavar="FIRST:LAST", help="only these steps, such as 3:5 (all that were kept)")
    made.add_argument("--ranks", type=int, nargs="+", metavar="N", help="only these ranks; all without")
    made.add_argument("--out", type=Path, metavar="FILE", help="what to write (RUN/trace/joined.json.gz)")
    made.add_argument("--last", action="store_true", help="tell what each rank did last, after a crash or in a hang")
    made.add_argument("--before", action="store_true", help="the same of the start before the newest one")
    made.add_argument("--cost", action="store_true", help="tell what share of a step recording takes")
    return made


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code."""
    options = parser().parse_args(arguments)
    try:
        if options.last or options.before:
            _tell_last(options.run, options.before)
            return DONE
        steps = read_steps(options.steps) if options.steps else None
        with naming(str(options.run / TRACE)):
            traces = read_traces(options.run, options.ranks)
            if options.cost:
                tell(_cost(traces))
                return DONE
            out = options.out or options.run / TRACE / "joined.json.gz"
            events = join(traces, steps, out)
            tell(_in_short(options.run, waterfall(traces, steps)))
    except (ValueError, OSError) as error:
        tell(f"error: {error}", sys.stderr)
        return BAD_INPUT
    tell(f"\n{out}: {events} events; open it at https://ui.perfetto.dev")
    return DONE


def _in_short(run: Path, found: Waterfall | None) -> str:
    """The waterfall as text; without one, what to look at instead."""
    if found is None:
        error = last_error(run)
        ended = [f"The run ended with an error: {error}"] if error else []
        lines = ["no step is whole on every rank: nothing can be said of where its time goes", *ended]
        return "\n".join([*lines, f"What each rank did last: tools/trace.py {run} --last"])
    lines = [f"Steps {found.steps[0]} to {found.steps[-1]}, {found.ranks} ranks; medians over steps:\n", *found.lines()]
    lines.append(f"\n{found.words}")
    if found.clock_error_us:
        lines.append(f"The ranks' clocks may differ by {found.clock_error_us:.0f} microseconds.")
    return "\n".join(lines)


def _cost(traces: Sequence[RankTrace]) -> str:
    """Cost of recording: the events of the busiest rank and step, and the CPU time of an event here, as others may use
    this machine too."""
    shares = []
    for trace in traces:
        for begin, end in (when for _, when in steps_of(trace).values()):
            events = sum(e["ph"] != "M" and begin <= e["ts"] <= end for e in trace.events)
            shares.append((events / (end - begin), events, (end - begin) / 1e6))
    if not shares:
        raise InputError("the traces", "have no whole step to measure the cost of recording", "let the run finish one")
    with TemporaryDirectory() as folder:
        made = Trace(Path(folder), Process(0, "rank 0", 1), own_clock(), 1, dict)
        with recording(made), phase("update"):
            began = process_time_ns()
            for number in range(EVENTS):
                with span("forward-compute", micro=number):
                    pass
            each_us = (process_time_ns() - began) / EVENTS / 1e3
    _, events, seconds = max(shares)
    return (
        f"An event takes {each_us:.1f} us of a CPU here; of {len(shares)} steps of {len(traces)} ranks, the one with "
        f"most for its time has {events} in {seconds:.3g} s: "
        f"recording takes {events * each_us / seconds / 1e4:.3f} % of it"
    )


def _tell_last(run: Path, before: bool) -> None:
    """Prints the last events of each rank, in the newest start or the one before it, and the ranks that others may be
    waiting for.

    Raises:
        InputError: The run has no such records.
    """
    files = sorted(file for file in (run / FLIGHT).glob("rank-*") if file.name.endswith(BEFORE) == before)
    if not files:
        raise InputError(str(run / FLIGHT), "has no file", "choose the directory of a run, such as runs/tiny")
    last = {file.name: moments_in(file) for file in files}
    waiting = {name: bool(found) and any(map(waits, found[-1].inside)) for name, found in last.items()}
    for name, found in last.items():
        inside = " > ".join(found[-1].inside) if found and found[-1].inside else "nothing"
        when = f", since {_clock(found[-1].time)}" if found else ""
        tell(f"{name}: in {inside}{when}, line {found[-1].number if found else 0}")
        for moment in found[-MOMENTS:]:
            tell(f"    {_in_words(moment)}")
    # If all ranks wait, or none does, the records do not tell which rank holds up the others.
    if 0 < sum(waiting.values()) < len(waiting):
        tell(f"Not waiting for others: {', '.join(name for name in last if not waiting[name])}")


def _in_words(moment: Moment) -> str:
    what = "begins" if moment.begins else "ends"
    return f"{_clock(moment.time)} {'/'.join(moment.open)} {what} {moment.about}".rstrip()


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds)) + f"{seconds % 1:.6f}"[1:]


if __name__ == "__main__":
    end_with_code_of(main)
