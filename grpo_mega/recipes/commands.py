"""Commands of a recipe's stages, their settings, and the records of their start and end.

It imports only packages that read settings, so that a launcher's interpreter can import it.
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
from grpo_mega.config.load import compose_config, defaults, identity
from grpo_mega.config.read_only import LAYOUT, read_under
from grpo_mega.config.schema import Config
from grpo_mega.errors import ConfigError, InputError
from grpo_mega.models.families import FAMILIES
from grpo_mega.recipes.products import checksum, folder_of
from grpo_mega.recipes.progress import CHANGED, DONE, RecipeProgress, again_mark, again_or, set_aside, write_report
from grpo_mega.recipes.recipe import REFERENCE, Recipe, RecipeStage

TOOLS = Path(__file__).resolve().parents[2] / "tools"
TRAIN = "grpo_mega.train"
PLACE = "products"
"""Placeholder for the products of unfinished stages when all commands are checked."""


@dataclass(frozen=True)
class Start:
    """A start of a stage.

    Attributes:
        command: Command that runs.
        files: {path: checksum} of its inputs from outside the recipe, at its start.
        moment: Start time, in seconds since 1970.
    """

    command: list[str]
    files: dict[str, str]
    moment: float


def begin(recipe: Recipe, stage: RecipeStage, command: Sequence[str], known: Mapping[str, RecipeProgress]) -> Start:
    """Records the inputs of a stage just before it is started or resumed."""
    # Choosing is short and never resumes after a kill, unlike runs and pools.
    if stage.kind == "choose":
        set_aside(recipe, stage)
    files = {str(path): checksum(path) for path in files_of(recipe, stage, known)}
    return Start([*command], files, time.time())


def finish(recipe: Recipe, stage: RecipeStage, start: Start, known: Mapping[str, RecipeProgress]) -> None:
    """Writes the report of a stage whose command succeeded.

    Raises:
        RuntimeError: The stage has no product.
    """
    seconds = time.time() - start.moment
    write_report(recipe, stage, start.command, settings_of(recipe, stage), start.files, known, seconds)
    again_mark(recipe, stage.name).unlink(missing_ok=True)


def refuse_changes(recipe: Recipe, known: Mapping[str, RecipeProgress]) -> None:
    """Raises an InputError that names every stage whose settings, inputs or product have changed since it was done."""
    changed = [
        InputError(f"stage {name}", one.why, again_or(name)) for name, one in known.items() if one.state == CHANGED
    ]
    # Products that were put in place by hand have no settings. Reports of the previous release have another checksum of
    # the same settings, and their stages must not count as changed.
    changed += [
        InputError(f"stage {name}", "the files of configs/ behind its settings have changed", again_or(name))
        for name, one in known.items()
        if one.state == DONE
        and one.report["words"] is not None
        and one.report.get("settings")
        not in (settings_of(recipe, recipe.stages[name]), settings_as_before(recipe, recipe.stages[name]))
    ]
    if changed:
        raise ConfigError.of(changed)


def check(recipe: Recipe) -> None:
    """Checks the settings of every training run, and the layout of every pool.

    Raises an InputError that names all stages whose settings cannot be used.
    """
    problems: list[InputError] = []
    for stage in recipe.stages.values():
        where = f"stage {stage.name}"
        try:
            settings_of(recipe, stage)
            config_of_pool(recipe, stage)
        except ConfigError as error:
            problems += [InputError(f"{where}: {one.where}", one.what, one.fix) for one in error.problems]
        except InputError as error:
            problems.append(InputError(f"{where}: {error.where}", error.what, error.fix))
        except (ValueError, FileNotFoundError) as error:
            problems.append(InputError(where, str(error), "correct its words"))
    if problems:
        raise ConfigError.of(problems)


def settings_of(recipe: Recipe, stage: RecipeStage) -> str:
    """Checksum of a training run's settings that must not change, except paths of inputs; empty for other stages.

    Settings with their default are left out, so that later releases may add some. Raises InputError or
    FileNotFoundError when they cannot be used.
    """
    usual, stays = defaults(), _staying(recipe, stage)
    return _checksum({name: value for name, value in stays.items() if name not in usual or value != usual[name]})


def settings_as_before(recipe: Recipe, stage: RecipeStage) -> str:
    """`settings_of` as the release before this one wrote it: with defaults, and families of models as switches."""
    stays = _staying(recipe, stage)
    family = stays.pop("model.family", None)
    switches = {f"model.{known.formerly}": known.name == family for known in FAMILIES.values() if known.formerly}
    return _checksum(stays | switches if stays else {})


def _staying(recipe: Recipe, stage: RecipeStage) -> dict[str, object]:
    if stage.kind != "run":
        return {}
    return identity(compose_config([*planned_words(stage), *place(recipe, stage)]))


def _checksum(settings: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest() if settings else ""


def config_of_pool(recipe: Recipe, stage: RecipeStage) -> Config | None:
    """Configuration with which a pool reads the model of an earlier run; None for other stages, and if the settings of
    that run are invalid.

    Raises:
        InputError: The stage's processes do not fit its layout.
    """
    source = REFERENCE.fullmatch(stage.words[0]) if stage.kind == "samples" else None
    if source is None or recipe.stages[source[1]].kind != "run":
        return None
    try:
        trained = compose_config(planned_words(recipe.stages[source[1]]))
    # `check` reports this for the run itself.
    except (ValueError, FileNotFoundError):
        return None
    layout = [word for word in stage.words if word.startswith(LAYOUT)]
    return read_under(trained, layout, stage.processes)


def planned_words(stage: RecipeStage) -> list[str]:
    """Words of a stage before its input products exist."""
    return stage.with_products({name: f"{PLACE}/{name}" for name in stage.inputs})


def command_of(recipe: Recipe, stage: RecipeStage, known: Mapping[str, RecipeProgress]) -> list[str]:
    """Command of a stage on one machine; {name} stands for the products of unfinished stages."""
    program, words = program_of(stage), words_of(recipe, stage, known)
    if stage.kind == "choose":
        return [sys.executable, program, *words]
    # torchrun's rendezvous is a file: --standalone would open a port to everybody (docs/security.md).
    meet = ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *meet]
    module = ["-m"] if stage.kind == "run" else []
    return [*torchrun, "--nproc-per-node", str(stage.processes), *module, program, *words]


def program_of(stage: RecipeStage) -> str:
    """Program of every process of a stage: a module for a training run, else a file."""
    tools = {"samples": "evaluate.py", "choose": "rejection_sample.py"}
    return TRAIN if stage.kind == "run" else str(TOOLS / tools[stage.kind])


def words_of(recipe: Recipe, stage: RecipeStage, known: Mapping[str, RecipeProgress]) -> list[str]:
    """Arguments of a stage's program; {name} stands for the products of unfinished stages."""
    products = {name: str(product) for name in stage.inputs if (product := known[name].product)}
    return [*stage.with_products(products), *place(recipe, stage)]


def files_of(recipe: Recipe, stage: RecipeStage, known: Mapping[str, RecipeProgress]) -> list[Path]:
    """Files and folders that a stage reads from outside the recipe: data, first weights, words that are paths."""
    words = stage.with_products({name: str(known[name].product) for name in stage.inputs})
    named = [word.rpartition("=")[2] for word in words]
    if stage.kind == "run":
        named = [*inputs(compose_config([*words, *place(recipe, stage)])).values()]
    # Products of earlier stages are compared by their reports, so only files from outside count here.
    products = {known[name].product for name in stage.inputs}
    return sorted({path for path in map(Path, named) if path.exists() and path not in products})


def place(recipe: Recipe, stage: RecipeStage) -> list[str]:
    """Words that set the path of the product, and for samples that the recipe's own runs are to be trusted."""
    path = str(folder_of(recipe, stage))
    places = {"samples": [*(["--trust-run"] if stage.inputs else []), "--out", path], "choose": ["--output", path]}
    return places.get(stage.kind) or [f"run.root={recipe.root}", f"run.name={stage.name}"]
