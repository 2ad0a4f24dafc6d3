"""What the stages of a recipe run, by which command and on which settings, and how one begins and ends.

It needs no package but those that read settings, so that a launcher's interpreter can import it.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_mega.config.inputs import inputs
from grpo_mega.config.load import compose_config, identity
from grpo_mega.config.reading import LAYOUT, read_under
from grpo_mega.config.schema import Config
from grpo_mega.recipe.products import checksum, folder_of
from grpo_mega.recipe.progress import CHANGED, DONE, Progress, again_mark, set_aside, write_report
from grpo_mega.recipe.recipe import REFERENCE, Recipe, Stage

TOOLS = Path(__file__).resolve().parents[2] / "tools"
TRAIN = "grpo_mega.train"
PLACE = "products"
"""Stands for the products of stages that are not done when all commands are checked."""


@dataclass(frozen=True)
class Start:
    """A start of a stage.

    Attributes:
        command: What runs.
        files: {path: checksum} of what it reads from elsewhere, as it was when it began.
        moment: When it began, in seconds since 1970.
    """

    command: list[str]
    files: dict[str, str]
    moment: float


def begin(recipe: Recipe, stage: Stage, command: Sequence[str], known: Mapping[str, Progress]) -> Start:
    """Notes what a stage reads that is about to be started, for the first time or to go on."""
    if stage.kind == "choose":  # it takes little time, and never continues what a killed one has left
        set_aside(recipe, stage)
    files = {str(path): checksum(path) for path in files_of(recipe, stage, known)}
    return Start([*command], files, time.time())


def finish(recipe: Recipe, stage: Stage, start: Start, known: Mapping[str, Progress]) -> None:
    """Reports a stage whose command has ended well.

    Raises:
        RuntimeError: It has made nothing.
    """
    seconds = time.time() - start.moment
    write_report(recipe, stage, start.command, settings_of(recipe, stage), start.files, known, seconds)
    again_mark(recipe, stage.name).unlink(missing_ok=True)


def refuse_changes(recipe: Recipe, known: Mapping[str, Progress]) -> None:
    """Raises a ValueError that names every stage that was done with other settings or inputs, or has changed."""
    changed = [f"{name}: {one.why}" for name, one in known.items() if one.state == CHANGED]
    changed += [
        f"{name}: the files of configs/ that its settings are from say something else now; do it again with --again "
        f"{name}, or put the former back"
        for name, one in known.items()
        if one.state == DONE
        and one.report["words"] is not None
        and one.report.get("settings") != settings_of(recipe, recipe.stages[name])
    ]
    if changed:
        raise ValueError("\n".join(changed))


def check(recipe: Recipe) -> None:
    """Composes the settings of every training run, and arranges the processes of every pool.

    Raises a ValueError that names all stages whose settings cannot be used.
    """
    problems = []
    for stage in recipe.stages.values():
        try:
            settings_of(recipe, stage)
            config_of_pool(recipe, stage)
        except (ValueError, FileNotFoundError) as error:
            problems.append(f"stage {stage.name}: {error}")
    if problems:
        raise ValueError("\n".join(problems))


def settings_of(recipe: Recipe, stage: Stage) -> str:
    """Checksum of the settings of a training run that must stay, wherever its inputs lie; empty for other stages.

    Raises ValueError or FileNotFoundError when they cannot be used.
    """
    if stage.kind != "run":
        return ""
    stays = identity(compose_config([*planned_words(stage), *place(recipe, stage)]))
    return hashlib.sha256(json.dumps(stays, sort_keys=True).encode()).hexdigest()


def config_of_pool(recipe: Recipe, stage: Stage) -> Config | None:
    """The configuration under which a pool reads the model of an earlier run; None for what else a stage may be, and
    where the settings of that run cannot be used.

    Raises:
        ValueError: The stage's processes cannot be arranged in its layout.
    """
    source = REFERENCE.fullmatch(stage.words[0]) if stage.kind == "samples" else None
    if source is None or recipe.stages[source[1]].kind != "run":
        return None
    try:
        trained = compose_config(planned_words(recipe.stages[source[1]]))
    except (ValueError, FileNotFoundError):  # which is told of the run
        return None
    layout = [word for word in stage.words if word.startswith(LAYOUT)]
    return read_under(trained, layout, stage.processes)


def planned_words(stage: Stage) -> list[str]:
    """The words of a stage before the products that it reads are there."""
    return stage.with_products({name: f"{PLACE}/{name}" for name in stage.inputs})


def command_of(recipe: Recipe, stage: Stage, known: Mapping[str, Progress]) -> list[str]:
    """The command of a stage on one machine; {name} stands for the products of stages that are not done."""
    program, words = program_of(stage), words_of(recipe, stage, known)
    if stage.kind == "choose":
        return [sys.executable, program, *words]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    module = ["-m"] if stage.kind == "run" else []
    return [*torchrun, "--nproc-per-node", str(stage.processes), *module, program, *words]


def program_of(stage: Stage) -> str:
    """What every process of a stage runs: a module for a training run, else a file."""
    tools = {"samples": "evaluate.py", "choose": "rejection_sample.py"}
    return TRAIN if stage.kind == "run" else str(TOOLS / tools[stage.kind])


def words_of(recipe: Recipe, stage: Stage, known: Mapping[str, Progress]) -> list[str]:
    """What the program of a stage is told; {name} stands for the products of stages that are not done."""
    products = {name: str(product) for name in stage.inputs if (product := known[name].product)}
    return [*stage.with_products(products), *place(recipe, stage)]


def files_of(recipe: Recipe, stage: Stage, known: Mapping[str, Progress]) -> list[Path]:
    """Files and folders that a stage reads and no stage has made: data and first weights, words that are paths."""
    words = stage.with_products({name: str(known[name].product) for name in stage.inputs})
    named = [word.rpartition("=")[2] for word in words]
    if stage.kind == "run":
        named = [*inputs(compose_config([*words, *place(recipe, stage)])).values()]
    made = {known[name].product for name in stage.inputs}
    return sorted({path for path in map(Path, named) if path.exists() and path not in made})


def place(recipe: Recipe, stage: Stage) -> list[str]:
    """The words that say where the product lies."""
    path = str(folder_of(recipe, stage))
    own = {"samples": ["--out", path], "choose": ["--output", path]}
    return own.get(stage.kind) or [f"run.root={recipe.root}", f"run.name={stage.name}"]
