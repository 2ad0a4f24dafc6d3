"""Simulates generation with slices: seconds of a step, and how old tokens are, for several slices side by side.

    python tools/simulate.py r1zero_671b --completion-tokens 5000
    python tools/simulate.py r1zero_671b cluster=h200 --completion-tokens 7800 --spread 0.8
    python tools/simulate.py tiny cluster=h100 --run runs/tiny

Slices (docs/rollout.md) let completions outlive a step. The trainer's own stream of samples runs here, with engines
that only take time (grpo_mega/forecast/planning/slices.py): those of the experiment on the GPUs of `cluster.*`. The
first row is a run without slices, the second the experiment's own slices if it has them; then slices of half, one and
two mean lengths in both orders, and of the mean length with a reserve, with twice as many groups in flight, and ahead
of the updates. Lengths of completions are those of an earlier run with --run, else log-normal, cut at
`rollout.max_new_tokens`.

    slice      rollout.slice_tokens          order      rollout.order, and whether rollout.ahead
    groups     rollout.in_flight             reserve    rollout.reserve
    s a step   seconds of generation in a step, without updates and the hand-over of weights
    tokens/s   trained tokens a second of generation; gain: over those without slices
    reading    share of these seconds in which prompts, and completions that go on, are read
    at once    most completions that run at once in an engine: fewer than it gets if its cache is too small for all
    steps old  mean age of a token when it is learned; oldest: the largest; bound: what it can never exceed
    waiting    samples that wait for later steps
    length     mean length of trained completions; at first: in the first step. If short ones come first it is too small

Exit code: 0, or 2 if the settings cannot run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path

# Models are built on the meta device to know the engines' memory, which refuses to start where a GPU is visible.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from grpo_mega import platform
from grpo_mega.config.load import compose_config
from grpo_mega.config.typed import Renamed
from grpo_mega.errors import InputError
from grpo_mega.observe.launcher import end_with_code_of

DONE, BAD_INPUT = 0, 2


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", help="a file of configs/experiment, with or without experiment= before it")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="settings, as for training")
    parser.add_argument("--json", action="store_true", help="print numbers for programs")
    parser.add_argument("--run", type=Path, metavar="RUN", help="a run directory whose completions' lengths are taken")
    parser.add_argument(
        "--completion-tokens", type=float, metavar="N",
        help="mean tokens of a completion (30 %% of rollout.max_new_tokens)",
    )  # fmt: skip
    parser.add_argument("--answer-tokens", action=Renamed, const="--completion-tokens")
    parser.add_argument("--spread", type=float, metavar="X", help="standard deviation of the log of a length (0.7)")
    parser.add_argument(
        "--alike", type=float, metavar="X", help="correlation of the lengths of a group, from 0 to 1 (0.5)"
    )
    parser.add_argument("--prompt-tokens", type=int, default=200, metavar="N", help="tokens of a prompt (200)")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="steps to average, after the first ones (8)")
    options = parser.parse_intermixed_args(arguments)
    warnings.filterwarnings("ignore", module="megatron")
    platform.start_planning()
    # Megatron may be imported only once the platform is prepared.
    from grpo_mega.forecast.planning.strategies import as_table, assumed_lengths, compare_strategies, lengths_of_run

    try:
        config = compose_config([f"experiment={options.experiment.removeprefix('experiment=')}", *options.overrides])
        longest = config.rollout.max_new_tokens
        assumed = {name: value for name in ("spread", "alike") if (value := getattr(options, name)) is not None}
        if options.run and (assumed or options.completion_tokens is not None):
            what = "the run gives the lengths, and --completion-tokens, --spread and --alike are without effect"
            raise InputError(f"--run {options.run}", what, "leave them out, or leave out --run")
        for name in ("steps", "prompt_tokens"):
            if (number := getattr(options, name)) < 1:
                raise InputError(f"--{name.replace('_', '-')} {number}", "below 1", "choose a positive number")
        if options.run:
            lengths = lengths_of_run(options.run, longest)
        else:
            lengths = assumed_lengths(options.completion_tokens, longest, **assumed)
        rows = compare_strategies(config, lengths, options.prompt_tokens, options.steps)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    if options.json:
        print(json.dumps(rows))
        return DONE
    print(
        f"{config.run.name}: completions have {lengths.mean:,.0f} tokens on average and at most {longest:,}; the "
        f"lengths of a group correlate by {lengths.alike:.2f}\n\n{as_table(rows)}"
    )
    return DONE


if __name__ == "__main__":
    end_with_code_of(main)
