"""The first hour on a GPU: runs what needs one, from the safest step to the riskiest, collecting results.

    python tools/gpu_smoke.py                        one GPU
    python tools/gpu_smoke.py two                    two GPUs
    python tools/gpu_smoke.py node                   all GPUs of a machine, four or more
    python tools/gpu_smoke.py node --list            prints the commands, starts nothing
    python tools/gpu_smoke.py --only doctor tiny     some of the steps

Each step is a command of this project, with a limit of time. One that fails does not stop the others, unless they need
it. Logs, versions, the doctor's findings, settings and metrics of the runs lie in gpu-smoke/, whose summary.md says how
each step ended, and in gpu-smoke.tar.gz, to be sent back. Neither environment variables nor keys are written; paths
and host names are. Weights and checkpoints stay out of the tar file.

Exit code: 0 everything passed, 1 some steps did not, 2 it cannot run: too few GPUs here, or the folder exists.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path

from gpu_smoke_steps import SIZES, Step, steps_of

from grpo_mega.platform.files import write_atomic

REPOSITORY = Path(__file__).resolve().parents[1]
ALL_PASSED, SOME_FAILED, CANNOT = 0, 1, 2
"""Exit codes."""
NEEDED = {"one": 1, "two": 2, "node": 4}
"""Smallest number of GPUs for each size of the check."""
SENT = {".log", ".json", ".jsonl", ".yaml", ".html", ".png", ".md", ".txt"}
"""Suffixes of the files that the tar file includes."""
LARGEST = 20 * 2**20
"""Largest file, in bytes, that the tar file includes."""
PATIENCE = 60.0
"""Seconds that a terminated step has to end by itself: torchrun gives its ranks 30."""


@dataclass(frozen=True)
class Result:
    """Result of a step: passed, failed, ended (by its limit) or skipped, and why, if it did not pass."""

    name: str
    outcome: str
    why: str
    seconds: float
    command: str
    log: str


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", nargs="?", choices=SIZES, default="one", help="how many GPUs (one)")
    parser.add_argument("--list", action="store_true", help="print the commands and start nothing")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="run only these steps, without those that they need")
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-smoke"), metavar="FOLDER", help="where it writes (gpu-smoke)"
    )
    parser.add_argument(
        "--model", type=Path, default=Path("models/Qwen2.5-0.5B"), metavar="FOLDER", help="a small model"
    )
    parser.add_argument("--without-gpu", action="store_true", help="run the steps on this CPU, to try the tool")
    options = parser.parse_args(arguments)
    found = gpus_here()
    gpus = NEEDED[options.size] if options.size != "node" else max(4, found - found % 2)
    steps = steps_of(options.size, gpus, options.out.absolute(), options.model.absolute())
    if unknown := set(options.only or ()) - {step.name for step in steps}:
        parser.error(f"--only {min(unknown)}: the steps are {', '.join(step.name for step in steps)}")
    chosen = [step for step in steps if not options.only or step.name in options.only]
    if options.list:
        print("\n".join(f"# {step.name}: {step.shows}\n{shown(step)}" for step in chosen))
        return ALL_PASSED
    if found < NEEDED[options.size] and not options.without_gpu:
        print(
            f"error: torch sees {found} GPUs, and this needs {NEEDED[options.size]}. tools/doctor.py says why it may "
            "see fewer than there are; --list prints the commands, --without-gpu runs them on this CPU",
            file=sys.stderr,
        )
        return CANNOT
    if options.out.exists() and not options.only:
        print(f"error: {options.out} exists: move it away, or choose a different --out", file=sys.stderr)
        return CANNOT
    # SIGTERM also ends the step in progress, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return ALL_PASSED if run_steps(chosen, options.out, f"{options.size}, {found} GPUs here") else SOME_FAILED


def gpus_here() -> int:
    """Number of GPUs that torch sees."""
    # A slow import, for which --help need not wait.
    import torch

    return torch.cuda.device_count()


def shown(step: Step) -> str:
    """The command of a step as typed in a shell."""
    return shlex.join(["python", *step.words()[1:]])


def run_steps(steps: list[Step], out: Path, machine: str) -> bool:
    """Runs the steps, writes the summary after each and the tar file at the end; returns whether all passed.

    A step is skipped when a step that it depends on did not pass. Ctrl-C ends the step and those after it.
    """
    out.mkdir(parents=True, exist_ok=True)
    versions = {str(found.metadata["Name"]): found.version for found in distributions()}
    write_atomic(out / "versions.json", json.dumps(versions, indent=1, sort_keys=True) + "\n")
    results: list[Result] = []
    interrupted = False
    for number, step in enumerate(steps, 1):
        print(f"{number}/{len(steps)} {step.name}: {step.shows}", flush=True)
        bad = {result.name for result in results if result.outcome != "passed"}
        failed = [name for name in step.after if name in bad]
        if why := "interrupted" if interrupted else f"{failed[0]} did not pass" if failed else step.lacks:
            results.append(Result(step.name, "skipped", why, 0.0, shown(step), ""))
        else:
            results.append(run_step(step, out / f"{number:02d}-{step.name}.log"))
            interrupted = results[-1].why == "interrupted"
        last = results[-1]
        print(f"    {last.outcome} after {last.seconds:.0f} s" + (f": {last.why}" if last.why else ""), flush=True)
        write_summary(out, machine, results)
    pack(out)
    print(f"\n{out}/summary.md says how each step ended; {out}.tar.gz is what to send back (docs/first_gpu.md)")
    return all(result.outcome == "passed" for result in results)


def run_step(step: Step, log: Path) -> Result:
    """Runs a step with its output in `log`; then kills its process group, also after its limit or Ctrl-C."""
    began, why = time.monotonic(), ""
    with log.open("wb") as file:
        # In a new session the step leads a process group, with which everything that it starts can be ended.
        process = subprocess.Popen(
            step.words(),
            cwd=REPOSITORY,
            env=surroundings(),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(step.seconds)
            if code:
                why = f"exit code {code}; {log} ends: {last_line(log)}"
        except subprocess.TimeoutExpired:
            why = f"not done within {step.seconds} s"
        except KeyboardInterrupt:
            why = "interrupted"
        end_group(process)
    outcome = "ended" if why.startswith("not done") else "failed" if why else "passed"
    text = log.read_text(errors="replace")
    if outcome == "passed" and step.proof and not re.search(step.proof, text):
        # pytest ends with 0 even when it has skipped everything.
        outcome = "skipped" if re.search(r"\d+ skipped", text) else "failed"
        why = f"exit code 0, but {log} does not say {step.proof!r}; it ends: {last_line(log)}"
    return Result(step.name, outcome, why, time.monotonic() - began, shown(step), log.name)


def surroundings() -> dict[str, str]:
    """Environment of the steps: this one, with the project first on the import path."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), str(REPOSITORY / "kernels"), os.environ.get("PYTHONPATH")]))
    return {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends the remaining processes of a step: terminated first, killed after PATIENCE seconds."""
    for number, seconds in ((signal.SIGTERM, PATIENCE), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
            process.wait(seconds)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def last_line(log: Path) -> str:
    """Last non-empty line of a log, shortened."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else "nothing"


def write_summary(out: Path, machine: str, results: list[Result]) -> None:
    """Writes summary.json and summary.md of the results so far."""
    write_atomic(
        out / "summary.json", json.dumps({"machine": machine, "steps": [*map(asdict, results)]}, indent=1) + "\n"
    )
    rows = [f"| {r.name} | {r.outcome} | {r.seconds:.0f} | {r.log} | {r.why.replace('|', ' ')} |" for r in results]
    head = [
        f"# gpu-smoke: {machine}",
        "",
        "| step | outcome | seconds | log | why |",
        "| --- | --- | --- | --- | --- |",
    ]
    commands = ["", *(f"- {result.name}: `{result.command}`" for result in results)]
    write_atomic(out / "summary.md", "\n".join([*head, *rows, *commands]) + "\n")


def pack(out: Path) -> None:
    """Writes OUT.tar.gz: texts and pictures, no weights."""
    archive = out.with_name(f"{out.name}.tar.gz")
    with tarfile.open(archive.with_suffix(".tmp"), "w:gz") as tar:
        for file in sorted(path for path in out.rglob("*") if path.is_file()):
            weights = {"checkpoints", "base-models", "export"} & set(file.relative_to(out).parts)
            if file.suffix in SENT and not weights and file.stat().st_size <= LARGEST:
                tar.add(file, f"{out.name}/{file.relative_to(out)}")
    archive.with_suffix(".tmp").replace(archive)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
