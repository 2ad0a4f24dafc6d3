"""Description of a further model that a run uses (a teacher, a reward model), read from the model's files.

Neither torch nor transformers is imported: plans are made on machines without them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from grpo_mega.config.recorded import in_todays_words, plain
from grpo_mega.config.schema import DataConfig, ModelConfig
from grpo_mega.config.typed import literal
from grpo_mega.errors import InputError
from grpo_mega.models.families.reading import model_settings

FOLDER = "config.json"
"""File of a Hugging Face folder, and of a checkpoint imported from one."""
RUN = "config.yaml"
"""File of a run directory."""
CHECKPOINT = "state.json"
"""File of a checkpoint; that of a cached base model contains its training configuration."""


@dataclass(frozen=True)
class TrainedModel:
    """Description of a model that is not loaded yet.

    Attributes:
        model: Architecture of the model.
        data: Tokens of the model: `tokenizer`, `task` and `languages` are the model's, other fields are unknown.
    """

    model: ModelConfig
    data: DataConfig


def read_trained_model(setting: str, value: str, context: int) -> TrainedModel:
    """Reads a model's description from the run directory, checkpoint or Hugging Face folder that a setting names.

    Args:
        setting: Name of the setting, for errors.
        value: Value of the setting, the path.
        context: Longest sequence of the run in tokens, on which the architecture of some folders depends.

    Raises:
        FileNotFoundError: There is no such path.
        ValueError: The path is not a model, or not of a supported family; names the path, and the file or key.
    """
    path, named = Path(value), f"{setting}={value}"
    if not path.exists():
        raise FileNotFoundError(f"{named} does not exist; give a run directory, a checkpoint or a folder")
    if (path / FOLDER).is_file():
        found = {"model": model_settings(path, context), "data": {"tokenizer": str(path)}}
        return _settings(found, named, path / FOLDER)
    file = _described_in(path)
    if file is None:
        raise InputError(
            named,
            f"neither a run directory (no {RUN}) nor a checkpoint (no {CHECKPOINT}, or none that says how it was "
            f"trained), nor a Hugging Face folder (no {FOLDER})",
            "give one of these",
        )
    return _settings(_trained_with(file, named), named, file)


def is_described(path: Path) -> bool:
    """Whether a run directory or checkpoint contains its training configuration; a copied checkpoint may not."""
    return _described_in(path) is not None


def _described_in(path: Path) -> Path | None:
    return next((file for file in _places(path) if file.is_file()), None)


def _places(path: Path) -> Iterator[Path]:
    """Possible files of the training configuration of a run directory or a checkpoint."""
    yield path / RUN
    if (path / CHECKPOINT).is_file():
        if path.absolute().parent.name == "checkpoints":
            yield path.absolute().parent.parent / RUN
        if "config" in _json(path / CHECKPOINT):
            yield path / CHECKPOINT


def _trained_with(file: Path, named: str) -> dict[str, Any]:
    """Training configuration in a file, as it was written."""
    if file.name == CHECKPOINT:
        return in_todays_words(_json(file)["config"])
    try:
        return plain(file.read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            named, f"{file} cannot be read: {error}", "restore the file, or choose another model"
        ) from error


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(str(file), f"cannot be read: {error}", "restore it, or choose another model") from error
    return found if isinstance(found, dict) else {}


def _settings(found: dict[str, Any], named: str, file: Path) -> TrainedModel:
    """Architecture and tokens from a training configuration."""
    data = found.get("data") or {}
    try:
        model = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), literal(found["model"])))
        tokens = literal({name: data[name] for name in ("tokenizer", "task", "languages") if name in data})
        read = OmegaConf.to_object(
            OmegaConf.merge(OmegaConf.structured(DataConfig(task="", parse_special=True)), tokens)
        )
    except Exception as error:  # the type of error depends on what is wrong with the text
        what = f"this release does not support the model of {file}: {' '.join(str(error).split())}"
        raise InputError(named, what, "use the release that trained it, or choose another model") from error
    assert isinstance(model, ModelConfig)
    assert isinstance(read, DataConfig)
    return TrainedModel(model, read)
