"""Progress of a recipe: a report for each finished stage, and what has changed since it was written.

ROOT/NAME/         product of a stage: a run directory or a folder of samples; a file is ROOT/NAME.jsonl
ROOT/stages/       NAME.json for each finished stage: its words, and the checksums of its inputs (products of stages,
                   other files) and of its product
ROOT/set-aside/    former products of stages that were done again; nothing is deleted
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mega.errors import InputError
from grpo_mega.observe.foreign import finite, read_object
from grpo_mega.platform.files import only_one, write_atomic
from grpo_mega.recipes.products import achieved, checksum, folder_of, product_of, why_unlike
from grpo_mega.recipes.recipe import Recipe, RecipeStage

DONE, CHANGED, BEGUN, WAITING = "done", "changed", "begun", "waiting"


@dataclass(frozen=True)
class RecipeProgress:
    """Progress of a stage.

    Attributes:
        state: done; changed (done, but its inputs or product have changed since); begun; or waiting.
        why: What has changed; empty in other states.
        product: Product; None until the stage is done.
        report: Report of the stage; {} until it is done.
    """

    state: str
    why: str
    product: Path | None
    report: dict[str, Any]


def report_file(recipe: Recipe, name: str) -> Path:
    """Path of a stage's report."""
    return recipe.root / "stages" / f"{name}.json"


def again_mark(recipe: Recipe, name: str) -> Path:
    """Marker file that exists while a stage is being done again."""
    return recipe.root / "stages" / f".{name}.again"


def progress_of(recipe: Recipe) -> dict[str, RecipeProgress]:
    """Progress of every stage, in order.

    Raises:
        InputError: A report cannot be read.
    """
    known: dict[str, RecipeProgress] = {}
    for stage in recipe.stages.values():
        # In order, as each stage is compared with the products of earlier ones.
        known[stage.name] = _progress(recipe, stage, known)
    return known


def _progress(recipe: Recipe, stage: RecipeStage, earlier: Mapping[str, RecipeProgress]) -> RecipeProgress:
    file = report_file(recipe, stage.name)
    if not file.is_file():
        return RecipeProgress(BEGUN if folder_of(recipe, stage).exists() else WAITING, "", None, {})
    try:
        report = read_object(file)
        numbers = [report.get("seconds", 0), *report.get("achieved", {}).values()]
        if any(finite(value) is None for value in numbers) or not isinstance(report["words"], list | None):
            raise TypeError("a result or its words are of the wrong kind")
        product = recipe.root / report["product"]["path"]
        why = _difference(stage, report, product, earlier)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        fix = "move it away, and the stage is done again"
        raise InputError(str(file), f"not a report of a stage ({error!r})", fix) from error
    return RecipeProgress(CHANGED if why else DONE, why, product, report)


def again_or(name: str) -> str:
    """What to do about a stage of which something has changed since it was done."""
    return f"do it again with --again {name}, or restore the former"


def _difference(
    stage: RecipeStage, report: dict[str, Any], product: Path, earlier: Mapping[str, RecipeProgress]
) -> str:
    """Difference of a stage's inputs or product from its report; empty if they agree."""
    if not product.exists():
        return f"its product, {product}, is gone"
    if checksum(product) != report["product"]["sha256"]:
        return f"its product, {product}, has changed (SHA-256)"
    words = report["words"]
    # The product was put in place by hand, so it has no inputs to compare.
    if words is None:
        return ""
    if words != [*stage.words]:
        gone = " ".join(word for word in words if word not in stage.words) or "nothing"
        new = " ".join(word for word in stage.words if word not in words) or "nothing"
        return f"its settings have changed: {gone} became {new}"
    # Inputs are compared by content: a stage that was done again with the same result changes nothing.
    for name, read in report["inputs"].items():
        if earlier[name].report.get("product", {}).get("sha256") != read["sha256"]:
            return f"it was made from another {name}: {read['path']}"
    for path, digest in report["files"].items():
        if not Path(path).exists() or checksum(Path(path)) != digest:
            return f"its input {path} has changed (SHA-256)"
    return ""


def write_report(
    recipe: Recipe,
    stage: RecipeStage,
    command: list[str],
    settings: str,
    files: Mapping[str, str],
    known: Mapping[str, RecipeProgress],
    seconds: float,
) -> None:
    """Writes the report of a finished stage.

    Args:
        recipe: The recipe.
        stage: One of its stages.
        command: Command that has run.
        settings: Checksum of a training run's settings.
        files: {path: checksum} of its inputs from outside the recipe.
        known: Progress of the earlier stages.
        seconds: Wall seconds of its last start.

    Raises:
        RuntimeError: The stage has no product.
    """
    product = product_of(recipe, stage)
    if product is None:
        raise RuntimeError(f"stage {stage.name} ended without its product {folder_of(recipe, stage)}")
    report = {
        "stage": stage.name,
        "words": [*stage.words],
        "command": command,
        "settings": settings,
        "inputs": {name: known[name].report["product"] for name in stage.inputs},
        "files": dict(files),
        "product": {"path": str(product.relative_to(recipe.root)), "sha256": checksum(product)},
        "achieved": achieved(recipe, stage),
        "seconds": round(seconds, 1),
    }
    _write(recipe, stage.name, report)


def replace_product(recipe: Recipe, stage: RecipeStage, product: Path) -> None:
    """Replaces a stage's product by another one, whether it was done or not; the stage's own files are kept.

    Raises:
        FileNotFoundError: The product does not exist.
        InputError: The product is of another kind, or the recipe is running.
    """
    if problem := why_unlike(stage, product):
        raise InputError(str(product), f"cannot replace the product of {stage.name}", f"choose another path: {problem}")
    made = {"path": str(product.absolute()), "sha256": checksum(product)}
    nothing: dict[str, Any] = {"words": None, "command": [], "inputs": {}, "files": {}, "achieved": {}, "seconds": 0}
    recipe.root.mkdir(parents=True, exist_ok=True)
    with only_one(recipe.root / "recipe"):
        _write(recipe, stage.name, {"stage": stage.name, "product": made, "settings": ""} | nothing)


def _write(recipe: Recipe, name: str, report: dict[str, Any]) -> None:
    file = report_file(recipe, name)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, json.dumps(report, indent=2) + "\n")


def set_aside(recipe: Recipe, stage: RecipeStage) -> None:
    """Moves a stage's product and report into the folder set-aside, so that it is done again."""
    folder = folder_of(recipe, stage)
    files = (folder, folder.with_suffix(".report.json"), report_file(recipe, stage.name))
    existing = [path for path in files if path.exists()]
    if not existing:
        return
    number = 1
    while (aside := recipe.root / "set-aside" / f"{stage.name}-{number}").exists():
        number += 1
    aside.mkdir(parents=True)
    # The report first: after a kill in between, a stage without a report does not count as done.
    for path in reversed(existing):
        path.rename(aside / path.name)


SHARES = ("accuracy", "format", "pair_accuracy")
"""Results shown in percent."""


def table(recipe: Recipe, known: Mapping[str, RecipeProgress]) -> list[str]:
    """A line about the recipe, and one for each stage: state, seconds of its last start, results."""
    done = [one for one in known.values() if one.state == DONE]
    width = max(map(len, known))
    lines = [f"{recipe.name} in {recipe.root}: {len(done)} of {len(known)} stages are done"]
    for number, (name, one) in enumerate(known.items(), start=1):
        seconds = one.report.get("seconds", 0)
        took = f"{seconds:6,.0f} s" if seconds else " " * 8
        if one.why:
            said = f"{one.why}; {again_or(name)}"
        elif one.report and one.report["words"] is None:
            said = f"replaced by hand: {one.product}"
        else:
            said = ", ".join(_written(result, value) for result, value in one.report.get("achieved", {}).items())
        lines.append(f"{number:4}  {name:{width}}  {one.state:7}  {took}  {said}".rstrip())
    return lines


def _written(name: str, value: float) -> str:
    words = name.replace("_", " ")
    if name in SHARES:
        return f"{words} {value:.1%}"
    return f"{value:,} {words}" if isinstance(value, int) else f"{words} {value:.4g}"
