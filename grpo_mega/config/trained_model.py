"""A model that a run uses beside the one it trains, as its files describe it: a teacher, a reward model.

Neither torch nor transformers is imported: plans are made where there is none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from grpo_mega.config.huggingface.architecture import model_settings
from grpo_mega.config.schema import DataConfig, ModelConfig

FOLDER = "config.json"
"""What a Hugging Face folder has, and a checkpoint that was imported from one."""
RUN = "config.yaml"
"""What a run directory has."""
CHECKPOINT = "state.json"
"""What a checkpoint has; that of a cached base model says what it was trained with."""


@dataclass(frozen=True)
class TrainedModel:
    """A model that is not loaded yet.

    Attributes:
        model: Its architecture.
        data: Which tokens it knows: `tokenizer`, `task` and `languages` are the model's, others are unknown.
    """

    model: ModelConfig
    data: DataConfig


def read_trained_model(setting: str, value: str, context: int) -> TrainedModel:
    """What the files say that a setting names: those of a run directory, a checkpoint or a Hugging Face folder.

    Args:
        setting: Its name, for errors.
        value: The path.
        context: Tokens of the longest sequence of the run, of which some folders' architectures depend.

    Raises:
        FileNotFoundError: There is no such path.
        ValueError: It is no model, or none of a supported family; names the path, and the file or key.
    """
    path, named = Path(value), f"{setting}={value}"
    if not path.exists():
        raise FileNotFoundError(f"{named} does not exist; name a run directory, a checkpoint or a folder")
    if (path / FOLDER).is_file():
        found = {"model": model_settings(path, context), "data": {"tokenizer": str(path)}}
        return _settings(found, named, path / FOLDER)
    file = _described_in(path)
    if file is None:
        raise ValueError(
            f"{named} is neither a run directory (no {RUN}) nor a checkpoint (no {CHECKPOINT}, or none that says how "
            f"it was trained), nor a Hugging Face folder (no {FOLDER}); name one"
        )
    return _settings(_trained_with(file, named), named, file)


def is_described(path: Path) -> bool:
    """Whether the files of a run directory or checkpoint say how its model was trained; one that was copied may not."""
    return _described_in(path) is not None


def _described_in(path: Path) -> Path | None:
    return next((file for file in _places(path) if file.is_file()), None)


def _places(path: Path) -> Iterator[Path]:
    """Where the configuration may be that a run directory or a checkpoint was made with."""
    yield path / RUN
    if (path / CHECKPOINT).is_file():
        if path.absolute().parent.name == "checkpoints":
            yield path.absolute().parent.parent / RUN
        if "config" in _json(path / CHECKPOINT):
            yield path / CHECKPOINT


def _trained_with(file: Path, named: str) -> dict[str, Any]:
    """The configuration in a file, as it was written."""
    if file.name == CHECKPOINT:
        return _json(file)["config"]
    try:
        found = OmegaConf.to_container(OmegaConf.load(file))
    except Exception as error:  # the error depends on what is wrong with the text
        raise ValueError(f"{named}: {file} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{named}: {file} is not the configuration of a run")
    return {str(key): value for key, value in found.items()}


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}


def _settings(found: dict[str, Any], named: str, file: Path) -> TrainedModel:
    """The part of a configuration that is about the model and its tokens."""
    data = found.get("data") or {}
    try:
        model = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), found["model"]))
        tokens = {name: data[name] for name in ("tokenizer", "task", "languages") if name in data}
        read = OmegaConf.to_object(
            OmegaConf.merge(OmegaConf.structured(DataConfig(task="", parse_special=True)), tokens)
        )
    except Exception as error:  # the error depends on what is wrong with the text
        raise ValueError(
            f"{named}: {file} has no model that this release knows: {' '.join(str(error).split())}"
        ) from error
    assert isinstance(model, ModelConfig)
    assert isinstance(read, DataConfig)
    return TrainedModel(model, read)
