"""Computes the memory that a run needs on every GPU, on a laptop and in seconds, before a job is queued.

    python tools/plan.py r1zero_671b
    python tools/plan.py r1zero_671b layout.ep=32 cluster.nodes=128 --json
    python tools/plan.py own_model run.init_from=FOLDER data.train_path=FILE cluster=h100 cluster.nodes=2 --propose

Composes the experiment with its overrides, checks every rule, and builds the modules of one rank of every pipeline
stage on the meta device. Parameters, weights, gradients and optimizer state are counted; activations and the rest of
the lines are estimates (described in grpo_mega/planning/memory.py). The machines are those of `cluster.*`, or
the fewest processes that fit the layout.

When engines share the GPUs, a second table shows the memory while they run (grpo_mega/rollout/sglang/memory.py).

`--propose` searches for a layout (grpo_mega/planning/propose.py) and prints the settings of it.

Exit code: 0 the run fits (or the GPUs' memory is unknown), 1 it does not, 2 the settings cannot run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # models built here must not be on a GPU

from grpo_mega import platform
from grpo_mega.config.load import compose_config

FITS, TOO_BIG, BAD_INPUT = 0, 1, 2


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", help="a file of configs/experiment, with or without experiment= before it")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for training")
    parser.add_argument("--json", action="store_true", help="print numbers for programs, in parameters and bytes")
    parser.add_argument(
        "--propose", action="store_true", help="replace layout.* by the cheapest that fits the machines of cluster.*"
    )
    options = parser.parse_intermixed_args(arguments)
    warnings.filterwarnings("ignore", module="megatron")
    platform.start_planning()
    # These import Megatron, which needs the platform to be prepared.
    from grpo_mega.planning.plan import plan
    from grpo_mega.planning.propose import differing, propose
    from grpo_mega.planning.show import show

    experiment = options.experiment.removeprefix("experiment=")
    try:
        config = compose_config([f"experiment={experiment}", *options.overrides])
        proposed = propose(config) if options.propose else config
        planned = plan(proposed)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    if options.propose:
        planned["settings"] = dict(differing(config, proposed))
    if options.json:
        print(json.dumps(planned))
    else:
        if options.propose:
            words = [f"{name}={json.dumps(value)}" for name, value in planned["settings"].items()]
            print("proposed:", " ".join(words) or "the layout that is set", end="\n\n")
        show(planned)
    turns = [planned["fits"], planned["engine"] and planned["engine"]["fits"]]
    return TOO_BIG if False in turns else FITS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
