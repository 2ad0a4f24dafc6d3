r"""Rejection sampling: chooses, of samples that were generated and scored, those that a model is to learn from.

    python tools/evaluate.py runs/tiny --train 1000 --samples 4 --out pool
    python tools/rejection_sample.py pool --per-problem 2 --choose shortest --output chosen.jsonl
    torchrun --nproc-per-node 2 -m grpo_mega.train ... sft.path=chosen.jsonl sft.epochs=2 run.steps=0

Pools are folders that tools/evaluate.py wrote; several are chosen from together. A sample must have ended by itself,
and the reward's success term must be 1 or more; --keep asks for more, such as --keep 'language>=0.9', of any term that
the pool was scored with (one of weight 0 is a filter only). A problem has no completion twice.

Where a teacher's prompts end with <think>, its completions begin inside the thoughts: --begin '<think>\n' puts that in
front, for a learner whose own template does not.

The output is JSON Lines for sft.path: prompt, completion, and where each is from. Beside it, FILE.report.json says what
was read and written, by checksum, and how many samples each filter left out. Both appear when they are whole, the
report first; neither is overwritten.

Exit code: 0 done, 2 something cannot be read or nothing passes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from grpo_mega.evaluate.selection import CHOICES, THOUGHTS, Filters, Pool, Selection, condition, open_pool, rows, select
from grpo_mega.platform.files import only_one, write_atomic, writing_atomic

DONE, BAD_INPUT = 0, 2


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("pools", nargs="+", type=Path, metavar="POOL", help="folder that tools/evaluate.py wrote")
    made.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl", help="where the chosen samples go")
    made.add_argument(
        "--keep", nargs="+", default=[], metavar="TERM>=VALUE", help="conditions, with >= or <=, on terms of the reward"
    )
    made.add_argument("--shortest", type=int, default=1, metavar="TOKENS", help="of a completion")
    made.add_argument("--longest", type=int, metavar="TOKENS", help="of a completion")
    made.add_argument("--begin", default="", metavar="TEXT", help="put before every completion; \\n is a line end")
    made.add_argument("--per-problem", type=int, metavar="N", help="samples of a problem (all)")
    made.add_argument("--choose", choices=CHOICES, default="first", help="which ones of a problem (first)")
    return made


def chosen(options: argparse.Namespace) -> Selection:
    """Chooses, and writes the output and its report.

    Raises:
        ValueError: It cannot be done so; names the option, the pool or the filters.
        OSError: A file cannot be read or written.
    """
    report_file = options.output.with_suffix(".report.json")
    if options.output.suffix != ".jsonl":
        raise ValueError(f"--output {options.output}: it is JSON Lines; give it the ending .jsonl")
    if not options.output.parent.is_dir():
        raise ValueError(f"--output {options.output}: there is no folder {options.output.parent}; make it")
    for path in (options.output, report_file):
        if os.path.lexists(path):
            raise ValueError(f"{path} exists; remove it, or name another --output")
    if options.per_problem is not None and options.per_problem < 1:
        raise ValueError(f"--per-problem {options.per_problem}: choose 1 or more")
    if options.longest is not None and options.longest < options.shortest:
        raise ValueError(f"--longest {options.longest} is below --shortest {options.shortest}: nothing can pass")
    named = [pool.resolve() for pool in options.pools]
    if twice := [str(pool) for i, pool in enumerate(options.pools) if named[i] in named[:i]]:
        raise ValueError(f"{twice[0]} is named twice")
    filters = Filters(
        tuple(condition(text) for text in options.keep),
        options.shortest,
        options.longest,
        options.per_problem,
        options.choose,
    )
    pools = [open_pool(folder) for folder in options.pools]
    selection = select(pools, filters)
    digest = hashlib.sha256()
    with only_one(options.output), writing_atomic(options.output) as file:
        for row in rows(pools, selection, _unescaped(options.begin)):
            line = json.dumps(row, allow_nan=False).encode() + b"\n"
            digest.update(line)
            file.write(line)
        of_all = report(pools, filters, selection, options.output, digest.hexdigest())
        write_atomic(report_file, json.dumps(of_all | {"begin": options.begin}, indent=2) + "\n")
    return selection


def _unescaped(text: str) -> str:
    r"""The text with line ends for each \n, which is easier to write in a shell."""
    return text.replace("\\n", "\n")


def report(pools: list[Pool], filters: Filters, selection: Selection, output: Path, sha256: str) -> dict[str, Any]:
    """What was read and written, by checksum, and how many samples each filter left out."""
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
        "problems_with_a_sample": selection.solved,
        "output": {"file": str(output), "rows": len(selection.chosen), "sha256": sha256},
    }


def main(arguments: list[str]) -> int:
    """The command; returns its exit code."""
    options = parser().parse_args(arguments)
    try:
        selection = chosen(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    print("\n".join([*selection.lines(), f"in {options.output}"]))
    if selection.opened and not options.begin:
        print(
            f"warning: {selection.opened:,} of them continue thoughts that the teacher's prompt began with {THOUGHTS}; "
            f"for a learner whose template does not, give --begin '{THOUGHTS}\\n'",
            file=sys.stderr,
        )
    return DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
