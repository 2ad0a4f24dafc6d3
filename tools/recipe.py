"""Runs a recipe: a chain of training runs, pools of samples and data sets chosen from them, such as DeepSeek-R1's.

    python tools/recipe.py run r1_tiny
    python tools/recipe.py run r1_tiny run.seed=1 --root runs/r1_tiny_1
    python tools/recipe.py status r1_tiny
    python tools/recipe.py show r1_tiny
    python tools/recipe.py plan r1_671b
    python tools/recipe.py run r1_tiny --again reasoning_data
    python tools/recipe.py again r1_tiny reasoning_data
    python tools/recipe.py replace r1_tiny cold_start_data my_own.jsonl

A recipe is a file of configs/recipe, or any YAML file of that form. Its products are in runs/NAME, or in --root.

run       does all unfinished stages, one after the other. A command that was killed or stopped (SIGTERM, Ctrl-C)
          resumes where it was. Settings are added to the training runs of all stages (run.seed=1) or of one
          (r1_zero:run.steps=40); give them again to resume. With --again, a stage and all that depend on it are done
          again; their former products are set aside.
status    shows progress, results of the stages, and what has changed since they were done; draws chain.png.
show      prints the commands of all stages.
plan      says for every training run whether it fits its GPUs (tools/plan.py); exit code 1 if one does not.
again     sets aside the products of a stage and of all that depend on it: the next run of the recipe does them again.
replace   replaces a stage's product by a checkpoint, a folder or a file.

Exit code: 0 done, 1 a stage failed, 2 bad input, 75 stopped and can resume.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from grpo_mega.config.typed import as_meant
from grpo_mega.errors import InputError
from grpo_mega.observe.foreign import tell
from grpo_mega.platform.files import only_one
from grpo_mega.recipes.commands import TOOLS, command_of, planned_words
from grpo_mega.recipes.picture import plot_chain
from grpo_mega.recipes.progress import progress_of, replace_product, table
from grpo_mega.recipes.recipe import Recipe, file_of, read_recipe
from grpo_mega.recipes.walk import StageFailed, WalkStopped, begin_again, walk

DONE, FAILED, BAD_INPUT, STOPPED = 0, 1, 2, 75


def _parser() -> argparse.ArgumentParser:
    """Parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "status", "show", "plan", "again", "replace"), help="see above")
    parser.add_argument("recipe", metavar="RECIPE", help="of configs/recipe, or a file")
    parser.add_argument("settings", nargs="*", metavar="[STAGE:]FIELD=VALUE", help="settings; or STAGE, and PATH")
    parser.add_argument("--root", type=Path, metavar="FOLDER", help="folder of all products (runs/NAME)")
    parser.add_argument("--processes", type=int, default=0, metavar="N", help="processes of every stage (the recipe's)")
    parser.add_argument("--again", metavar="STAGE", help="run: do this stage again, and all that depend on it")
    return parser


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code."""
    options = _parser().parse_intermixed_args(as_meant(arguments))
    try:
        settings = [] if options.what in ("again", "replace") else options.settings
        recipe = read_recipe(file_of(options.recipe), options.root, settings, options.processes)
        if options.what == "replace":
            _replace(recipe, options.settings)
        if options.what == "again":
            _again(recipe, options.settings)
        if options.what == "run":
            walk(recipe, options.again, tell)
        if options.what == "plan":
            return plan(recipe)
        tell(commands(recipe) if options.what == "show" else status(recipe))
    except (ValueError, OSError) as error:
        tell(f"error: {error}", sys.stderr)
        return BAD_INPUT
    except (StageFailed, RuntimeError) as error:
        tell(f"error: {error}", sys.stderr)
        return FAILED
    except WalkStopped as stopped:
        tell(stopped, sys.stderr)
        return STOPPED
    return DONE


def _replace(recipe: Recipe, words: list[str]) -> None:
    """Replaces the product of the stage named by the first word with the path in the second word."""
    if len(words) != 2:
        fix = "give a recipe, a stage and a path, as in: replace r1_tiny cold_start_data my.jsonl"
        raise InputError("replace", f"{len(words)} arguments after the recipe", fix)
    replace_product(recipe, recipe.stage(words[0]), Path(words[1]))


def _again(recipe: Recipe, words: list[str]) -> None:
    """Marks the named stage to be done again by the next run of the recipe, for instance a job."""
    if len(words) != 1:
        fix = "give a recipe and a stage, as in: again r1_tiny reasoning_data"
        raise InputError("again", f"{len(words)} arguments after the recipe", fix)
    # A walk of this recipe holds the same lock, and its products must not be set aside meanwhile.
    with only_one(recipe.root / "recipe"):
        begin_again(recipe, recipe.stage(words[0]).name)


def commands(recipe: Recipe) -> str:
    """Commands of all stages, for a shell; {NAME} stands for products that do not exist yet."""
    known = progress_of(recipe)
    return "\n\n".join(
        f"# {stage.name}{f': {stage.about}' if stage.about else ''}\n{shlex.join(command_of(recipe, stage, known))}"
        for stage in recipe.stages.values()
    )


def plan(recipe: Recipe) -> int:
    """Prints the plan (tools/plan.py) of every training run; returns the exit code."""
    unfit = 0
    for stage in recipe.stages.values():
        if stage.kind == "run":
            planned = subprocess.run(
                [sys.executable, str(TOOLS / "plan.py"), *planned_words(stage)], capture_output=True, text=True
            )
            unfit += planned.returncode != 0
            verdicts = [line for line in planned.stdout.splitlines() if line.startswith(("fits", "does not fit"))]
            tell(f"{stage.name}: {'; '.join(verdicts) or planned.stderr.strip() or 'no GPUs are planned'}")
    return FAILED if unfit else DONE


def status(recipe: Recipe) -> str:
    """Progress of the recipe as a table; also draws it once a run is done."""
    known = progress_of(recipe)
    picture = plot_chain(recipe, known)
    return "\n".join([*table(recipe, known), *([f"drawn in {picture}"] if picture else [])])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
