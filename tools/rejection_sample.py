r"""Rejection sampling: selects generated and scored samples to train on.

    python tools/evaluate.py runs/tiny --train 1000 --samples 4 --out pool
    python tools/rejection_sample.py pool --per-problem 2 --choose shortest --output chosen.jsonl
    torchrun --nproc-per-node 2 -m grpo_mega.train ... sft.path=chosen.jsonl sft.epochs=2 run.steps=0

Pools are folders written by tools/evaluate.py; several can be combined. A sample must have ended by itself, and the
reward's success term must be 1 or more; --keep adds conditions, such as --keep 'language>=0.9', on any term that the
pool was scored with (one of weight 0 is only a filter). A completion of a problem is chosen once.

Where a teacher's prompts end with <think>, its completions begin inside the thoughts: --begin '<think>\n' puts that in
front, for a model whose own template does not.

With --pairs the output is for a reward model (pairs.path): prompt, chosen, a sample that passes the filters, and
rejected, one of the same problem that ended by itself and whose success is below 1; --per-problem then counts pairs.

With --steps the output is for a process reward model (run.trains=process_reward_model, pairs.path): prompt, completion,
steps and labels, of samples of chain sums, right and wrong; the verifier of worked sums labels the steps, the success
labels the answer after them. --separators must be pairs.separators of the run that trains on them. With --continued
labels come from continuations instead, for problems of any kind (Math-Shepherd): a step's is the share of them that
ended right, or with --hard whether any did, and the last step's is the success. --compare says how often the labels
agree with others of the same completions, such as a verifier's; a step is right from 0.5 on.

--also appends your own rows, such as those of other tasks, to the chosen ones.

The output is JSON Lines for sft.path: prompt, completion, and origin. Samples with calls of an environment also get
token_ids and given, the spans of replies, which are not learned. Beside it, FILE.report.json has the checksums of
inputs and output, and the number of samples that each filter left out. Both appear when they are complete, the report
first; neither is overwritten.

Exit code: 0 done, 2 an input cannot be read or nothing passes, 75 stopped by SIGTERM or SIGUSR1: nothing is written.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from grpo_mega.config.typed import as_meant
from grpo_mega.data.supervised import plain_rows
from grpo_mega.errors import InputError
from grpo_mega.evaluate.results import SAMPLES
from grpo_mega.observe.launcher import BAD_INPUT, STOPPED, Heartbeat, leave, mark_refused, refusing_options
from grpo_mega.platform.files import only_one, write_atomic, writing_atomic
from grpo_mega.platform.stop import SIGNALS
from grpo_mega.recipes.curation.continuing import Continued, read_continued
from grpo_mega.recipes.curation.labelling import (
    SUM_SEPARATORS,
    StepSelection,
    by_continuations,
    compare,
    label_steps,
    verified,
)
from grpo_mega.recipes.curation.preferences import PairSelection, rows_of_pairs, select_pairs
from grpo_mega.recipes.curation.selection import (
    CHOICES,
    THOUGHTS,
    SampleFilters,
    SamplePool,
    Selection,
    condition,
    open_pool,
    rows,
    select,
)

DONE = 0
Chosen = Selection | PairSelection | StepSelection


def parser() -> argparse.ArgumentParser:
    """Parser of the options."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("pools", nargs="+", type=Path, metavar="POOL", help="folder that tools/evaluate.py wrote")
    options.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl", help="where the chosen samples go")
    options.add_argument(
        "--keep", nargs="+", default=[], metavar="TERM>=VALUE", help="conditions, with >= or <=, on terms of the reward"
    )
    options.add_argument("--shortest", type=int, default=1, metavar="TOKENS", help="of a completion")
    options.add_argument("--longest", type=int, metavar="TOKENS", help="of a completion")
    options.add_argument("--begin", default="", metavar="TEXT", help="put before every completion; \\n is a line end")
    options.add_argument("--per-problem", type=int, metavar="N", help="samples of a problem (all)")
    options.add_argument("--choose", choices=CHOICES, default="first", help="which samples of a problem (first)")
    options.add_argument("--also", nargs="+", type=Path, default=[], metavar="FILE", help="rows for sft.path to append")
    either = options.add_mutually_exclusive_group()
    either.add_argument(
        "--pairs", action="store_true", help="write pairs of a right and a wrong completion, for pairs.path"
    )
    either.add_argument(
        "--steps", action="store_true", help="write worked sums whose steps have labels, for pairs.path"
    )
    options.add_argument(
        "--continued", nargs="+", type=Path, default=[], metavar="FOLDER", help="--steps: continuations of each pool"
    )
    options.add_argument("--hard", action="store_true", help="--continued: 1 for a step if any continuation ends right")
    options.add_argument(
        "--compare",
        type=Path,
        metavar="FILE.jsonl",
        help="--steps: other labels of the same completions; prints how often they agree",
    )
    options.add_argument("--separators", nargs="+", metavar="TEXT", help="what divides the steps (; </think>)")
    return options


def chosen(options: argparse.Namespace) -> Chosen:
    """Chooses samples, and writes the output and its report.

    Raises:
        InputError: The input is invalid; names the option, the pool or the filters.
        OSError: A file cannot be read or written.
    """
    _require_output(options.output)
    _require_options(options)
    filters = SampleFilters(
        tuple(condition(text) for text in options.keep),
        options.shortest,
        options.longest,
        options.per_problem,
        options.choose,
    )
    pools = [open_pool(folder) for folder in options.pools]
    selection, written = _selected(options, pools, filters)
    # The checksum is taken of the rows while they are written, so the output is never read again.
    digest, count = hashlib.sha256(), 0
    with only_one(options.output), writing_atomic(options.output) as file:
        for row in written:
            line = json.dumps(row, allow_nan=False).encode() + b"\n"
            digest.update(line)
            file.write(line)
            count += 1
        also = {str(path): _sha256(path) for path in options.also}
        of_all = report(pools, filters, selection) | {"begin": options.begin, "also": also}
        if options.continued:
            of_all |= {
                "hard": options.hard,
                "continued": {str(path): _sha256(path / SAMPLES) for path in options.continued},
            }
        of_all["output"] = {"file": str(options.output), "rows": count, "sha256": digest.hexdigest()}
        # Inside the context: the output gets its name last, and so is never there without its report.
        write_atomic(_report_of(options.output), json.dumps(of_all, indent=2) + "\n")
    return selection


def _report_of(output: Path) -> Path:
    return output.with_suffix(".report.json")


def _require_output(output: Path) -> None:
    """Raises InputError when the output and its report cannot be written there."""
    if output.suffix != ".jsonl":
        raise InputError(f"--output {output}", "not a name for JSON Lines", "give it the ending .jsonl")
    if not output.parent.is_dir():
        raise InputError(f"--output {output}", f"the folder {output.parent} does not exist", "create it")
    for path in (output, _report_of(output)):
        if os.path.lexists(path):
            raise InputError(str(path), "exists", "remove it, or choose a different --output")


def _require_options(options: argparse.Namespace) -> None:
    """Raises InputError when an option has a bad value or does not go with another."""
    if options.per_problem is not None and options.per_problem < 1:
        raise InputError(f"--per-problem {options.per_problem}", "too few", "choose 1 or more")
    if options.longest is not None and options.longest < options.shortest:
        what = f"below --shortest {options.shortest}: nothing can pass"
        raise InputError(f"--longest {options.longest}", what, "raise it, or lower --shortest")
    named = [pool.resolve() for pool in options.pools]
    if twice := [str(pool) for i, pool in enumerate(options.pools) if named[i] in named[:i]]:
        raise InputError(twice[0], "given twice", "leave one of them out")
    if options.also and (options.pairs or options.steps):
        kind = "--pairs" if options.pairs else "--steps"
        what = f"adds rows for sft.path, and {kind} writes rows for pairs.path"
        raise InputError("--also", what, "leave one of them out")
    if options.separators and (not options.steps or options.continued):
        what = "divide the steps of --steps, and those of --continued are divided already"
        raise InputError("--separators", what, "leave them out, or give --steps alone")
    if options.continued and not options.steps:
        raise InputError("--continued", "is for --steps", "give this too, or leave it out")
    if options.hard and not options.continued:
        raise InputError("--hard", "is for --continued", "give this too, or leave it out")
    if options.compare and not options.steps:
        raise InputError("--compare", "is for labels of --steps", "give this too, or leave it out")


def _selected(
    options: argparse.Namespace, pools: list[SamplePool], filters: SampleFilters
) -> tuple[Chosen, Iterable[dict[str, Any]]]:
    """The selection from the pools, and the rows of the output."""
    begin = _unescaped(options.begin)
    if options.steps:
        continued = _continued(options, pools)
        separators = [_unescaped(text) for text in options.separators or SUM_SEPARATORS]
        if continued:
            separators = next(iter(continued.values())).separators
        judge = by_continuations(continued, options.hard) if continued else verified
        steps = label_steps(pools, filters, judge, separators, begin)
        if options.compare:
            steps.compared = compare(steps.rows, options.compare)
        return steps, steps.rows
    if options.pairs:
        pairs = select_pairs(pools, filters)
        return pairs, rows_of_pairs(pools, pairs, begin)
    samples = select(pools, filters)
    return samples, chain(rows(pools, samples, begin), *map(plain_rows, options.also))


def _continued(options: argparse.Namespace, pools: list[SamplePool]) -> dict[str, Continued]:
    """Continuations of each pool, by its checksum; {} without --continued.

    Raises:
        InputError: They do not match the pools in order, or have different separators.
    """
    if not options.continued:
        return {}
    if len(options.continued) != len(pools):
        what = f"{len(options.continued)} folders for {len(pools)} pools"
        raise InputError("--continued", what, "give one for each pool, in order")
    pairs = zip(options.continued, pools, strict=True)
    continued = {pool.sha256: read_continued(folder, pool) for folder, pool in pairs}
    if len({tuple(each.separators) for each in continued.values()}) > 1:
        what = "the folders' continuations begin after steps of different --separators"
        raise InputError("--continued", what, "make them with the same --separators")
    return continued


def _unescaped(text: str) -> str:
    r"""The text with line ends in place of \n, which is easier to write in a shell."""
    return text.replace("\\n", "\n")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def report(pools: list[SamplePool], filters: SampleFilters, selection: Chosen) -> dict[str, Any]:
    """Checksums of the pools read, and the number of samples that each filter left out."""
    pairs = isinstance(selection, PairSelection)
    steps = {"steps": True, "compared": selection.compared} if isinstance(selection, StepSelection) else {}
    return {
        "pools": [
            {
                "folder": str(pool.folder),
                "sha256": pool.sha256,
                "settings": pool.settings,
            }
            for pool in pools
        ],
        "keep": [str(each) for each in filters.conditions],
        "tokens": [filters.shortest, filters.longest],
        "per_problem": filters.per_problem,
        "choose": filters.choose,
        "samples": selection.samples,
        "problems": selection.problems,
        "left_out": dict(selection.left_out),
        "pairs": pairs,
        **steps,
        "problems_with_a_pair" if pairs else "problems_with_a_sample": _solved(selection),
    }


def _solved(selection: Chosen) -> int:
    if isinstance(selection, StepSelection):
        return selection.labelled
    return selection.paired if isinstance(selection, PairSelection) else selection.solved


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code."""
    with refusing_options():
        options = parser().parse_args(as_meant(arguments))
    Heartbeat()("choose")
    try:
        selection = chosen(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        mark_refused(ranks=1, seconds=0)
        return BAD_INPUT
    print("\n".join([*selection.lines(), f"in {options.output}"]))
    if isinstance(selection, Selection) and selection.opened and not options.begin:
        print(
            f"warning: {selection.opened:,} of them continue thoughts that the teacher's prompt began with {THOUGHTS}; "
            f"for a learner whose template does not, give --begin '{THOUGHTS}\\n'",
            file=sys.stderr,
        )
    return DONE


if __name__ == "__main__":
    for number in SIGNALS:
        signal.signal(number, lambda *_: leave("stopped; give the command again if its file is not there", STOPPED))
    sys.exit(main(sys.argv[1:]))
