"""What the launcher asks about a recipe: stage.py check|next|done --recipe NAME ... -- [STAGE:]FIELD=VALUE ...

check   prints `run DIRECTORY`, the recipe's root, `reads PATH` for what its runs read, and the `room` in MiB that their
        largest checkpoint needs; or all problems that can be seen without a node. Nothing is started or written.
next    writes what the stage is that is next, as `NAME VALUE` entries that end with a zero byte, to FILE; an empty file
        when all are done. Notes in the recipe's root that the stage begins.
done    reports the stage that `next` has named last; exit code 1 when it has not made what it is for.

The caller of `next` and `done` holds the recipe's lock. Exit code 2: it cannot be done so; 1: something failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import check  # the check of one run: it also finds this project, and says what an interpreter lacks

from grpo_mega.config.inputs import inputs
from grpo_mega.config.load import compose_config
from grpo_mega.config.rules import check_layout
from grpo_mega.config.schema import Config
from grpo_mega.observe.run_dir import LOCK
from grpo_mega.platform.files import write_atomic
from grpo_mega.recipes import commands
from grpo_mega.recipes.products import RESULTS, folder_of, product_of
from grpo_mega.recipes.progress import DONE, RecipeProgress, progress_of, table
from grpo_mega.recipes.recipe import Recipe, RecipeStage, file_of, read_recipe

BEGUN = ".begun.json"
"""In `stages/` of the recipe's root: the stage that began last, and the `Start` of it."""
FILE_OPTIONS = ("--also", "--data")
"""Options of the tools whose values are files: words up to the next option."""


def shape(stage: RecipeStage, nodes: int, ranks_per_node: int) -> tuple[int, int]:
    """(nodes, ranks of each) of a stage in a job of so many.

    Raises:
        ValueError: It does not fit.
    """
    count = stage.processes
    if count <= ranks_per_node:
        return 1, count
    if count % ranks_per_node or count > nodes * ranks_per_node:
        raise ValueError(
            f"{count} processes do not fill whole nodes (NODES={nodes}, RANKS_PER_NODE={ranks_per_node}): set these, "
            "or `processes` in the recipe"
        )
    return count // ranks_per_node, ranks_per_node


def problems_of(recipe: Recipe, options: argparse.Namespace) -> Iterator[str]:
    """Everything that keeps the stages from running, as far as it can be seen here."""
    known = progress_of(recipe)
    for refuse in (lambda: check.check_path(recipe.root), lambda: commands.refuse_changes(recipe, known)):
        try:
            refuse()
        except ValueError as error:
            yield str(error)
    largest = max(stage.processes for stage in recipe.stages.values())
    if options.nodes > 1 and largest <= (options.nodes - 1) * options.ranks_per_node:
        yield (
            f"no stage has more than {largest} processes, and the job has NODES={options.nodes} with "
            f"RANKS_PER_NODE={options.ranks_per_node}: set NODES={-(-largest // options.ranks_per_node)}, or "
            "`processes` in the recipe"
        )
    for stage in recipe.stages.values():
        if known[stage.name].state != DONE:
            for problem in stage_problems(recipe, stage, options):
                yield f"stage {stage.name}: {problem}"


def stage_problems(recipe: Recipe, stage: RecipeStage, options: argparse.Namespace) -> Iterator[str]:
    """What keeps one stage from running."""
    try:
        nodes, ranks = shape(stage, options.nodes, options.ranks_per_node)
    except ValueError as error:
        yield str(error)
        return
    if not options.queued:
        absent = (named for path, named in files_named(recipe, stage).items() if not os.path.exists(path))
        yield from (f"{named} does not exist" for named in absent)
    try:
        commands.config_of_pool(recipe, stage)
        if stage.kind != "run":
            return
        config = config_of(recipe, stage)
        if not config.layout.undecided:
            check_layout(config, nodes * ranks)
        check.check_machines(config, nodes, ranks)
    except (ValueError, FileNotFoundError) as error:
        yield str(error)


def config_of(recipe: Recipe, stage: RecipeStage) -> Config:
    """The configuration of a training run, in which products of other stages have no place yet."""
    return compose_config([*commands.planned_words(stage), *commands.place(recipe, stage)])


def files_named(recipe: Recipe, stage: RecipeStage) -> dict[str, str]:
    """{path: the words that name it} of what a stage reads and no stage makes, whether it is there or not."""
    named: dict[str, str] = {}
    if stage.kind == "run":
        try:
            read = inputs(config_of(recipe, stage))
        except (ValueError, FileNotFoundError):  # which is told elsewhere
            return {}
        for field, path in read.items():  # of fields that say the same, the first
            named.setdefault(path, f"{field}={path}")
    else:
        option = ""  # the model or the pools come first
        planned = commands.planned_words(stage)
        for word in [part for each in planned for part in (each.split("=", 1) if each.startswith("--") else [each])]:
            if word.startswith("-"):
                option = word
            elif option in FILE_OPTIONS or not (option or named):
                named[word.rpartition("=")[2]] = f"{option} {word}".strip()
    return {path: words for path, words in named.items() if not path.startswith(f"{commands.PLACE}/")}


def room(recipe: Recipe, options: argparse.Namespace) -> int:
    """MiB that the largest checkpoint of all stages needs.

    Raises:
        ImportError: There is nothing to plan with.
        ValueError: A checkpoint cannot be written in time; names the stage.
    """
    largest = 0
    for stage in recipe.stages.values():
        if stage.kind == "run":
            try:
                seconds = options.stop_seconds, options.hang_seconds, options.save_gb_per_second
                largest = max(largest, check.room(config_of(recipe, stage), *seconds))
            except ValueError as error:
                raise ValueError(f"stage {stage.name}: {error}") from error
    return largest


def check_recipe(recipe: Recipe, options: argparse.Namespace) -> None:
    """Prints what the job of a recipe needs to know. Raises ValueError when it cannot run; names all problems."""
    found, needed = [*options.known, *problems_of(recipe, options)], 0
    if options.stop_seconds is not None and not found:
        try:
            needed = room(recipe, options)
        except ImportError as error:
            print(f"warning: {sys.executable} has no {error.name}, so no checkpoint is planned", file=sys.stderr)
        except RuntimeError as error:
            print(f"warning: the checkpoints cannot be planned: {error}", file=sys.stderr)
        except ValueError as error:
            found.append(str(error))
    if found:
        lines = [f"{number:3}. " + problem.replace("\n", "\n     ") for number, problem in enumerate(found, 1)]
        said = "\n".join([f"{len(found)} {'problem' if len(found) == 1 else 'problems'}:", *lines])
        if not options.dry_run:
            raise ValueError(said)
        print(f"\n{said}")
        sys.exit(2)
    if options.dry_run:
        print("\n".join([*table(recipe, progress_of(recipe)), "\nready"]))
        return
    print("run", recipe.root)
    named = {path for stage in recipe.stages.values() for path in files_named(recipe, stage)}
    for reached in sorted({each for path in named for each in check.paths_of(Path(path))}):
        print("reads", reached)
    if needed:
        print("room", needed)


def next_stage(recipe: Recipe, options: argparse.Namespace) -> None:
    """Writes what the first stage is that is not done, and notes that it begins; see the module."""
    known = progress_of(recipe)
    commands.refuse_changes(recipe, known)
    stages = recipe.root / "slurm" / "stages"
    write_atomic(stages, "\n".join(table(recipe, known)) + "\n")
    waiting = [stage for stage in recipe.stages.values() if known[stage.name].state != DONE]
    entries = list(entries_of(recipe, waiting[0], known, options)) if waiting else []
    write_atomic(options.file, "".join(f"{name} {value}\0" for name, value in entries))


def entries_of(
    recipe: Recipe, stage: RecipeStage, known: dict[str, RecipeProgress], options: argparse.Namespace
) -> Iterator[tuple[str, object]]:
    """What the launcher is told of a stage, which begins now: (name, value)."""
    nodes, ranks = shape(stage, options.nodes, options.ranks_per_node)
    program, words = commands.program_of(stage), commands.words_of(recipe, stage, known)
    start = commands.begin(recipe, stage, [program, *words], known)
    begun = recipe.root / "stages" / BEGUN
    begun.parent.mkdir(exist_ok=True)
    write_atomic(begun, json.dumps({"stage": stage.name} | asdict(start)) + "\n")
    folder = folder_of(recipe, stage)
    yield from (("stage", stage.name), ("run", folder), ("nodes", nodes), ("ranks", ranks), ("program", program))
    locks = {"run": folder / LOCK, "samples": folder / f".{RESULTS}.lock"}
    yield "lock", locks.get(stage.kind, folder.with_name(f".{folder.name}.lock"))
    products = filter(None, (known[name].product for name in stage.inputs))
    read = [*commands.files_of(recipe, stage, known), *products]
    yield from (("reads", path) for named in read for path in sorted(check.paths_of(Path(named))))
    yield from (("word", word) for word in words)


def report_done(recipe: Recipe) -> int:
    """Reports the stage that began last; returns the exit code: 1 when it has not made what it is for."""
    begun = json.loads((recipe.root / "stages" / BEGUN).read_text())
    stage = recipe.stage(begun.pop("stage"))
    if product_of(recipe, stage) is None:
        return 1
    commands.finish(recipe, stage, commands.Start(**begun), progress_of(recipe))
    return 0


def arguments(words: list[str]) -> argparse.Namespace:
    """The options, which follow the first word."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--root", default="")
    parser.add_argument("--file", type=Path)
    check.add_options(parser)
    return parser.parse_args(words)


def main() -> int:
    """The command; returns its exit code."""
    what, options = sys.argv[1], arguments(sys.argv[2:])
    try:
        recipe = read_recipe(file_of(options.recipe), Path(options.root) if options.root else None, options.settings)
        if what == "done":
            return report_done(recipe)
        (check_recipe if what == "check" else next_stage)(recipe, options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ValueError, FileNotFoundError)) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
