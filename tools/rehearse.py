"""Runs a rank of a job through its real code on a GPU that computes nothing, before anybody queues.

    python tools/rehearse.py r1zero_671b --rank 384
    python tools/rehearse.py r1zero_671b --rank 384 --lengths 60000,2500,2500,2500
    python tools/rehearse.py qwen3_30b_a3b --rank worst --imbalance 1.5 --out rehearsed.json --picture rehearsed.png

Builds the rank of the experiment with its overrides: torch's CUDA build with its allocator, Transformer Engine,
Megatron and this project, on a null GPU (grpo_mega/forecast/rehearsal/nullgpu), with the other ranks of the job absent.
It runs a step's pieces (log-probs, two updates, the engine's turn) and prints for each the memory that torch holds,
kernels launched, operations of matrix products, where the host waits and what is sent, beside the plan of
tools/plan.py. What it cannot show is in docs/gpu.md.

It needs `make .venv-rehearse/.ready`, 7 GB, once; no GPU, and no more than a few GB of memory.

Exit code: 0 the ranks fit, 1 memory ran out, 2 the settings cannot run, or there is no such environment.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path

# This process only plans, and planning refuses to start where a GPU is visible. The null GPU is for its children.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from grpo_mega import platform
from grpo_mega.config.load import compose_config
from grpo_mega.platform.files import write_atomic

FITS, TOO_BIG, BAD_INPUT = 0, 1, 2
REPOSITORY = Path(__file__).resolve().parents[1]


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code."""
    options = _options(arguments)
    warnings.filterwarnings("ignore", module="megatron")
    platform.start_planning()
    # These import Megatron, which needs the platform to be prepared.
    from grpo_mega.forecast.planning.plan import plan
    from grpo_mega.forecast.rehearsal.job import Environment, NoEnvironment, specs
    from grpo_mega.forecast.rehearsal.show import draw, show, show_all, worst_of

    # Checked now rather than after minutes of rehearsals, whose results could not be written.
    for path in filter(None, (options.picture, options.out)):
        if not path.absolute().parent.is_dir():
            print(
                f"error: {path}: the folder {path.parent} does not exist; create it, or choose a different path",
                file=sys.stderr,
            )
            return BAD_INPUT
    settings = [f"experiment={options.experiment.removeprefix('experiment=')}", *options.overrides]
    try:
        config = compose_config(settings)
        planned = plan(config)
        ranks = [*specs(config, settings, planned, options.rank, options.lengths, options.imbalance)]
        environment = Environment.find(REPOSITORY)
        measured = [environment.run(REPOSITORY / "tools" / "rehearse_rank.py", spec) for spec in ranks]
    except (ValueError, NoEnvironment, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    if options.rank == "worst":
        show_all(measured, planned["memory"])
    else:
        for rank in measured:
            show(rank, planned["memory"][rank["stage"]])
    if options.picture:
        worst = worst_of(measured)
        draw(worst, planned["memory"][worst["stage"]], options.picture)
    if options.out:
        write_atomic(options.out, json.dumps({"planned": planned, "ranks": measured}, indent=1))
    return TOO_BIG if any(rank["failure"] for rank in measured) else FITS


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", help="a file of configs/experiment, with or without experiment= before it")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="settings, as for training")
    parser.add_argument(
        "--rank",
        default="worst",
        help="a number; all-stages: the first rank of every pipeline stage; worst: these, with balanced and skewed "
        "sequences, and the worst of them in full (default)",
    )
    parser.add_argument(
        "--lengths",
        default="balanced",
        help="tokens of each sequence of a replica in a pass, with commas; or balanced (default), or skewed: as "
        "unequal as a micro-batch can be",
    )
    parser.add_argument(
        "--imbalance", type=float, default=1.0, help="tokens that this rank's experts get, over the average (default 1)"
    )
    parser.add_argument("--out", type=Path, help="a JSON file for all numbers")
    parser.add_argument("--picture", type=Path, help="a PNG of memory over the step, by owner, of the worst rank")
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
