"""Predicts the memory that a run needs on every GPU, and its hours, on a laptop and in seconds.

    python tools/plan.py r1zero_671b
    python tools/plan.py r1zero_671b layout.ep=32 cluster.nodes=128 --json
    python tools/plan.py r1zero_671b --completion-tokens 5000 --explain
    python tools/plan.py qwen3_30b_a3b cluster.nodes=4 --search
    python tools/plan.py own_model run.init_from=FOLDER data.train_path=FILE cluster=h100 cluster.nodes=2 --propose

Composes the experiment with its overrides, checks every rule, and builds the modules of one rank of every pipeline
stage on the meta device. Parameters, weights, gradients and optimizer state are counted; activations and the other
lines are estimated (grpo_mega/forecast/planning/memory.py). The machines are those of `cluster.*`; without
`cluster.nodes`, the fewest whole machines that the layout can use, or on CPUs the fewest processes.

When engines share the GPUs, a second table shows the memory while they run (grpo_mega/rollout/sglang/memory.py).

With `cluster.gpu` a third table shows the seconds of a step by phase, and the GPU-hours of the run
(grpo_mega/forecast/planning/time.py). `--completion-tokens` is the mean length of a completion, which nobody knows
beforehand; `--explain` prints each formula with its numbers.

`--search` ranks the layouts that fit the machines of `cluster.*` by the seconds of a step
(grpo_mega/forecast/planning/search.py), the simplest of nearly the fastest first; `--propose` plans that one. With
`layout=auto`, the default, it plans the layout that the job would choose.

Exit code: 0 the run fits (or the GPUs' memory is unknown), 1 it does not, 2 the settings cannot run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from dataclasses import replace

# Models built here are for the meta device, and planning refuses to start where a GPU is visible.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from grpo_mega import platform
from grpo_mega.config.limits import Interval
from grpo_mega.config.load import compose_config
from grpo_mega.config.schema import Config
from grpo_mega.config.typed import Renamed
from grpo_mega.observe.launcher import end_with_code_of

FITS, TOO_BIG, BAD_INPUT = 0, 1, 2
SHARE = Interval("[0, 1]")


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", help="a file of configs/experiment, with or without experiment= before it")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="settings, as for training")
    parser.add_argument("--json", action="store_true", help="print numbers for programs, in parameters and bytes")
    parser.add_argument(
        "--propose", action="store_true", help="replace layout.* by the fastest that fits the machines of cluster.*"
    )
    parser.add_argument("--search", action="store_true", help="print the fastest layouts that fit, and why they are")
    parser.add_argument("--explain", action="store_true", help="print the formula of each time, with its numbers")
    parser.add_argument(
        "--completion-tokens", type=float, metavar="N",
        help="mean tokens of a completion (30 %% of rollout.max_new_tokens); longer limits later scale it",
    )  # fmt: skip
    parser.add_argument("--answer-tokens", action=Renamed, const="--completion-tokens")
    parser.add_argument("--prompt-tokens", type=int, default=200, metavar="N", help="tokens of a prompt (200)")
    parser.add_argument(
        "--signal", type=float, default=1.0, metavar="SHARE",
        help="share of groups whose completions differ in reward, if others are dropped or refilled (1)",
    )  # fmt: skip
    options = parser.parse_intermixed_args(arguments)
    if options.signal not in SHARE:
        print(f"error: --signal {options.signal:g}: {SHARE.refusal(options.signal)}", file=sys.stderr)
        return BAD_INPUT
    warnings.filterwarnings("ignore", module="megatron")
    platform.start_planning()
    experiment = options.experiment.removeprefix("experiment=")
    try:
        config = compose_config([f"experiment={experiment}", *options.overrides])
        return print_layouts(config, options) if options.search else print_plan(config, options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT


def print_layouts(config: Config, options: argparse.Namespace) -> int:
    """Searches layouts and prints them; returns the exit code. Raises InputError when none fits."""
    # Megatron may be imported only once the platform is prepared.
    from grpo_mega.forecast.planning.choice import search
    from grpo_mega.forecast.planning.show import show_layouts
    from grpo_mega.forecast.planning.time import Assumed

    searched = search(config, Assumed(options.completion_tokens, options.prompt_tokens, options.signal))
    if options.json:
        print(json.dumps(searched))
    else:
        show_layouts(searched)
    return FITS


def print_plan(config: Config, options: argparse.Namespace) -> int:
    """Plans the run and prints the plan; returns the exit code. Raises InputError when the settings cannot run."""
    from grpo_mega.forecast.planning.advice import changes_that_fit
    from grpo_mega.forecast.planning.choice import choose, machines_ahead, propose
    from grpo_mega.forecast.planning.explain import explain
    from grpo_mega.forecast.planning.hours import hours
    from grpo_mega.forecast.planning.plan import plan, planned_vocabulary
    from grpo_mega.forecast.planning.search import differing
    from grpo_mega.forecast.planning.show import as_words, show, show_changes, show_hours
    from grpo_mega.forecast.planning.time import Assumed

    assumed = Assumed(options.completion_tokens, options.prompt_tokens, options.signal)
    proposed, why = propose(config, assumed) if options.propose else config, ""
    if proposed.layout.undecided:
        machines = machines_ahead(config.cluster)
        chosen = choose(config, planned_vocabulary(config.model, config.data), machines)
        proposed, why = replace(chosen.config, cluster=machines), chosen.why
    planned = plan(proposed)
    planned["time"] = hours(proposed, planned, assumed)
    # None stands for what cannot be judged, such as the memory of unknown GPUs; only False is a misfit.
    needs = [planned["fits"], planned["engine"] and planned["engine"]["fits"], planned["host_fits"]]
    planned["changes"] = changes_that_fit(proposed) if False in needs else []
    if options.propose:
        planned["settings"] = dict(differing(config, proposed))
    if options.json:
        print(json.dumps(planned))
        return TOO_BIG if False in needs else FITS
    if options.propose:
        print("proposed:", as_words(planned["settings"]) or "the layout as set", end="\n\n")
    if why:
        print(why, end="\n\n")
    show(planned)
    show_changes(planned["changes"])
    if planned["time"]:
        show_hours(planned["time"], planned["gpus"])
        if options.explain:
            explain(proposed, planned, assumed)
    return TOO_BIG if False in needs else FITS


if __name__ == "__main__":
    end_with_code_of(main)
