"""Products of a recipe's stages, and their checksums."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from grpo_mega.errors import InputError
from grpo_mega.observe.foreign import read_object
from grpo_mega.observe.run_dir import CHECKPOINTS
from grpo_mega.observe.summary import SUMMARY
from grpo_mega.platform.manifest import MANIFEST
from grpo_mega.recipes.recipe import Recipe, RecipeStage

SAMPLES, RESULTS, CONFIG = "samples.jsonl", "results.json", "config.json"
WHOLE_BYTES = 1 << 26
"""Largest file of a Hugging Face folder, in bytes, whose content counts; of larger ones size and date do."""
SHORT = {"format_rate": "format", "mean_length": "length"}
"""Names in a run's summary -> names of the same measurements in evaluations."""


def folder_of(recipe: Recipe, stage: RecipeStage) -> Path:
    """Output path of a stage: a run directory, a folder of samples, or a file."""
    return recipe.root / (f"{stage.name}.jsonl" if stage.kind == "choose" else stage.name)


def product_of(recipe: Recipe, stage: RecipeStage) -> Path | None:
    """Product of a stage: the last checkpoint of a run, a folder of samples, or a file; None until it is complete."""
    folder = folder_of(recipe, stage)
    if stage.kind == "choose":
        return folder if folder.is_file() else None
    if stage.kind == "samples":
        return folder if (folder / RESULTS).is_file() else None
    summary = summary_of(folder)
    if summary.get("status") != "completed":
        return None
    checkpoint = folder / CHECKPOINTS / f"step-{summary['steps']:06d}"
    return checkpoint if (checkpoint / MANIFEST).is_file() else None


def why_unlike(stage: RecipeStage, product: Path) -> str:
    """Why a path cannot be the product of such a stage; empty if it can.

    Raises FileNotFoundError when it does not exist.
    """
    if not product.exists():
        raise FileNotFoundError(f"{product} does not exist")
    if stage.kind == "choose":
        return "" if product.is_file() else "the stage makes a file, JSON Lines"
    if stage.kind == "samples":
        return "" if (product / RESULTS).is_file() else f"the stage makes a folder of samples, with {RESULTS}"
    if (product / MANIFEST).is_file() or (product / CONFIG).is_file():
        return ""
    return f"the stage makes a checkpoint (runs/NAME/{CHECKPOINTS}/step-...) or a Hugging Face folder"


def summary_of(folder: Path) -> dict[str, Any]:
    """Summary of a run; {} without one. Raises InputError if it is damaged."""
    file = folder / SUMMARY
    try:
        return read_object(file) if file.is_file() else {}
    except ValueError as error:
        raise InputError(str(file), str(error), "restore it, or do the stage again") from None


def checksum(product: Path) -> str:
    """SHA-256 of a product: of a file, of a checkpoint's manifest (which has the checksums of its files), or of the
    files of a folder.

    Raises:
        FileNotFoundError: The product does not exist.
    """
    if product.is_file():
        return _of_file(product)
    if (product / MANIFEST).is_file():
        return _of_file(product / MANIFEST)
    if not product.is_dir():
        raise FileNotFoundError(f"{product} does not exist")
    if (product / RESULTS).is_file():
        return hashlib.sha256(f"{_of_file(product / SAMPLES)} {_of_file(product / RESULTS)}".encode()).hexdigest()
    digest = hashlib.sha256()
    # Checksums of all stages are computed before each stage starts. Hashing gigabytes of weights every time would take
    # too long, so their size and date must do.
    for file in sorted(path for path in product.rglob("*") if path.is_file()):
        status = file.stat()
        content = _of_file(file) if status.st_size <= WHOLE_BYTES else f"{status.st_size} {status.st_mtime_ns}"
        digest.update(f"{file.relative_to(product)} {content}\n".encode())
    return digest.hexdigest()


def _of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def achieved(recipe: Recipe, stage: RecipeStage) -> dict[str, float]:
    """Results of a stage by name: measurements of a run or of a pool of samples, rows of a file."""
    folder = folder_of(recipe, stage)
    if stage.kind == "choose":
        report = folder.with_suffix(".report.json")
        return {"rows": json.loads(report.read_text())["output"]["rows"]} if report.is_file() else {}
    if stage.kind == "samples":
        # Names with @ (pass@k, maj@k, rm@k) are points of curves over k, too many for a line.
        estimates = json.loads((folder / RESULTS).read_text()).get("all", {})
        return {name: estimate["mean"] for name, estimate in estimates.items() if "@" not in name}
    results = [(name.removesuffix("_after"), value) for name, value in summary_of(folder).items() if "_after" in name]
    after = {name.removeprefix("held_out_"): value for name, value in results}
    return {SHORT.get(name, name): value for name, value in after.items()}
