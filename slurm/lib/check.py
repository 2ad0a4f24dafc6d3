"""Prints the run directory of a configuration, and checks that it can start here: check.py --nodes N ... -- SETTING...

It prints `run DIRECTORY` and `reads PATH` for everything that the run reads, or an error with a fix, in about a second:
nothing is started or written. If torch and Megatron are installed, it also compares the model that the run starts from
with the configuration, and with --stop-seconds plans the checkpoint, refuses one that cannot be written and read again
in that time, or in --hang-seconds, and prints the `room` that it needs in MiB; this takes some seconds.

With --dry-run it lists all problems at once instead (grpo_mega/forecast/dry_run), and those that are --known already.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # models that are planned here must not be on the job's GPUs
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

try:
    import hydra  # noqa: F401
    import omegaconf  # noqa: F401
except ImportError as error:
    sys.exit(
        f"error: {sys.executable} has no {error.name}: set PYTHON, or with a container HOST_PYTHON, to an interpreter "
        "(3.11 or newer) with `pip install hydra-core`, or run `make .venv/.ready`"
    )

from grpo_mega import platform
from grpo_mega.checks import (
    Check,
    check_run_directory,
    input_checks,
    layout_checks,
    model_checks,
    refuse_all,
    run_directory,
)
from grpo_mega.config.inputs import inputs
from grpo_mega.config.load import compose_config
from grpo_mega.config.schema import Config
from grpo_mega.errors import InputError

MARGIN = 60
"""Seconds of the time to stop that are reserved for other work than the checkpoint."""
ROOM = 1024
"""MiB needed on the disk besides a checkpoint."""


def job_checks(config: Config, nodes: int, ranks_per_node: int) -> list[Check]:
    """Checks of what only a job on Slurm needs: its machines, and the names of its directories."""
    return [
        ("the machines", lambda: check_machines(config, nodes, ranks_per_node)),
        ("the directories", lambda: check_path(run_directory(config.run))),
    ]


def check_path(path: Path) -> None:
    """Raises an InputError when a name of a job's directory, or of the one that it starts in, has characters that Slurm
    or a container takes for more than a name."""
    for named, folder in (("run.root", path), ("the working directory", Path.cwd())):
        if found := re.search(r"[\s,:%\\\"']", str(folder)):
            raise InputError(
                named, f"Slurm jobs cannot use {str(folder)!r}: it contains {found[0]!r}", "choose another directory"
            )


def check_machines(config: Config, nodes: int, ranks_per_node: int) -> None:
    """Raises an InputError when the configuration plans for other machines than these."""
    planned = config.cluster.nodes, config.cluster.gpus_per_node
    if planned[0] and planned != (nodes, ranks_per_node):
        raise InputError(
            f"cluster.nodes={planned[0]}, cluster.gpus_per_node={planned[1]}",
            f"the job trains on {nodes} nodes with {ranks_per_node} ranks",
            f"add cluster.nodes={nodes} cluster.gpus_per_node={ranks_per_node}, or set NODES={planned[0]} "
            f"RANKS_PER_NODE={planned[1]}",
        )


def warn_of_tokenizer(config: Config) -> None:
    """Warns of a tokenizer that may be a program, which is not run."""
    tokenizer = Path(config.data.tokenizer)
    if tokenizer.is_dir() and not (tokenizer / "tokenizer.json").exists():
        print(
            f"warning: data.tokenizer={tokenizer} has no tokenizer.json; programs of its own are not run",
            file=sys.stderr,
        )


def paths_of(path: Path) -> set[Path]:
    """The paths that must be reachable to read a file or folder: itself, and the targets of links to it and in it."""
    files = path.iterdir() if path.is_dir() else ()
    return {path.absolute(), path.resolve(), *(file.resolve().parent for file in files if file.is_symlink())}


def room(config: Config, stop_seconds: int, hang_seconds: int, rate: float) -> int:
    """MiB on the run's disk that a checkpoint takes.

    Raises:
        ImportError: There is no torch or Megatron to plan with.
        ValueError: A checkpoint cannot be written and read again, for its checksums, in these seconds at `rate` GB/s.
    """
    platform.start_planning()
    from grpo_mega.forecast.planning.plan import plan

    size = plan(config)["checkpoint"]
    once = 2 * size / 1e9 / rate
    needed = MARGIN + once * (2 if config.run.async_save else 1)  # one may still be in progress
    takes = f"a checkpoint of {size / 1e9:,.0f} GB is written and read again in"
    measure = "or set SAVE_GB_PER_SECOND to what your file system takes from all nodes together"
    if needed > stop_seconds:
        raise InputError(
            f"STOP_SECONDS={stop_seconds}",
            f"{takes} {needed:.0f} s at SAVE_GB_PER_SECOND={rate:g}, more than there are before the time limit",
            f"give --signal=B:USR1@{needed + 60:.0f} or more, {measure}",
        )
    if once > hang_seconds:
        raise InputError(
            f"HANG_SECONDS={hang_seconds}",
            f"{takes} {once:.0f} s at SAVE_GB_PER_SECOND={rate:g}, and a run without a sign of life for so long counts "
            "as hung",
            f"set HANG_SECONDS={once + MARGIN:.0f} or more, {measure}",
        )
    return int(size / 2**20) + ROOM


def all_problems(options: argparse.Namespace) -> int:
    """Prints what the job would see, and all its problems; returns the exit code."""
    from grpo_mega.forecast.dry_run import dry_run

    nodes, ranks = options.nodes, options.ranks_per_node

    def more(config: Config) -> list[Check]:
        checks = job_checks(config, nodes, ranks)
        if options.stop_seconds is not None:
            seconds = options.stop_seconds, options.hang_seconds, options.save_gb_per_second
            checks.append(("the time to save", lambda: room(config, *seconds)))
        return checks

    return dry_run(options.settings, nodes * ranks, more, options.known)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that tell of the job."""
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--ranks-per-node", type=int, required=True)
    parser.add_argument(
        "--queued", action="store_true", help="data and weights were checked before; every node checks its own"
    )
    parser.add_argument("--stop-seconds", type=int)
    parser.add_argument("--hang-seconds", type=int)
    parser.add_argument("--save-gb-per-second", type=float)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--known", action="append", default=[])
    parser.add_argument("settings", nargs="*")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="megatron")
    if options.dry_run:
        sys.exit(all_problems(options))
    try:
        config = compose_config(options.settings)
        nodes, ranks = options.nodes, options.ranks_per_node
        checks = [*layout_checks(config, nodes * ranks), *job_checks(config, nodes, ranks)]
        checks.append(("the run directory", lambda: check_run_directory(config)))
        if not options.queued:
            checks += input_checks(config)
            warn_of_tokenizer(config)
        refuse_all(checks)
        print("run", run_directory(config.run))
        for path in sorted({path for named in inputs(config).values() for path in paths_of(Path(named))}):
            print("reads", path)
        if not options.queued:
            refuse_all(model_checks(config, None, config.model.vocab_size, alone=True))
        if options.stop_seconds is not None:
            print("room", room(config, options.stop_seconds, options.hang_seconds, options.save_gb_per_second))
    except ImportError as error:
        print(
            f"warning: {sys.executable} has no {error.name}, so neither weights nor checkpoint are checked",
            file=sys.stderr,
        )
    except RuntimeError as error:
        print(f"warning: the checkpoint cannot be planned: {error}", file=sys.stderr)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
