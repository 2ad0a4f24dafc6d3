"""The teacher of on-policy distillation as its files describe it: architecture and tokenizer, which are its own.

Neither torch nor transformers is imported: plans are made where there is none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from grpo_mega.config.huggingface.architecture import model_settings
from grpo_mega.config.rules.layout import layout_problems
from grpo_mega.config.rules.model import model_problems
from grpo_mega.config.rules.problems import refuse
from grpo_mega.config.schema import Config, DataConfig, ModelConfig

FOLDER = "config.json"
"""What a Hugging Face folder has, and a checkpoint that was imported from one."""
RUN = "config.yaml"
"""What a run directory has."""
CHECKPOINT = "state.json"
"""What a checkpoint has; that of a cached base model says what it was trained with."""


@dataclass(frozen=True)
class TeacherSettings:
    """A teacher that is not loaded yet.

    Attributes:
        model: Its architecture.
        data: Which tokens it knows: `tokenizer`, `task` and `languages` are the teacher's, others are unknown.
    """

    model: ModelConfig
    data: DataConfig


def read_teacher(config: Config) -> TeacherSettings | None:
    """What the files of `distill.teacher` say; None when the run has no teacher.

    Raises:
        FileNotFoundError: There is no such path.
        ValueError: It is no model, or none of a supported family; names the path, and the file or key.
    """
    if not config.distill.teacher:
        return None
    path = Path(config.distill.teacher)
    if not path.exists():
        raise FileNotFoundError(
            f"distill.teacher={path} does not exist; name a run directory, a checkpoint or a folder"
        )
    if (path / FOLDER).is_file():
        found = {"model": model_settings(path, config.model.context), "data": {"tokenizer": str(path)}}
        return _settings(found, path, path / FOLDER)
    file = next((file for file in _places(path) if file.is_file()), None)
    if file is None:
        raise ValueError(
            f"distill.teacher={path} is neither a run directory (no {RUN}) nor a checkpoint (no {CHECKPOINT}, or none "
            f"that says how it was trained), nor a Hugging Face folder (no {FOLDER}); name one"
        )
    return _settings(_trained_with(file, path), path, file)


def check_teacher(config: Config, teacher: TeacherSettings) -> None:
    """Checks that the layout of the run can split the teacher, and that it was made for sequences as long.

    Raises:
        ConfigError: It cannot; names the fields, which are the teacher's.
    """
    refuse([f"distill.teacher={config.distill.teacher}: {problem}" for problem in _problems(config, teacher)])


def _problems(config: Config, teacher: TeacherSettings) -> Iterator[str]:
    context, layout = config.model.context, config.layout
    if teacher.model.context < context:
        yield (
            f"it was made for sequences of {teacher.model.context} tokens, and model.context={context}; lower "
            f"model.context to {teacher.model.context}"
        )
    # The weights have a shape that cannot be changed, as those of run.init_from.
    run = replace(config.run, init_from=config.distill.teacher)
    theirs = replace(config, model=replace(teacher.model, context=context), run=run)
    for problem in (*model_problems(theirs), *layout_problems(theirs)):
        yield f"of the teacher, {problem}"
    if not (config.model.moe.experts or teacher.model.moe.experts):
        for name, size in (("layout.ep", layout.ep), ("layout.etp", layout.etp)):
            if size > 1:
                yield f"{name}={size} needs experts, and neither the model nor its teacher has any; set {name}=1"


def _places(path: Path) -> Iterator[Path]:
    """Where the configuration may be that a run directory or a checkpoint was made with."""
    yield path / RUN
    if (path / CHECKPOINT).is_file():
        if path.absolute().parent.name == "checkpoints":
            yield path.absolute().parent.parent / RUN
        if "config" in _json(path / CHECKPOINT):
            yield path / CHECKPOINT


def _trained_with(file: Path, path: Path) -> dict[str, Any]:
    """The configuration in a file, as it was written."""
    if file.name == CHECKPOINT:
        return _json(file)["config"]
    try:
        found = OmegaConf.to_container(OmegaConf.load(file))
    except Exception as error:  # the error depends on what is wrong with the text
        raise ValueError(f"distill.teacher={path}: {file} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise ValueError(f"distill.teacher={path}: {file} is not the configuration of a run")
    return {str(key): value for key, value in found.items()}


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}


def _settings(found: dict[str, Any], path: Path, file: Path) -> TeacherSettings:
    """The part of a configuration that is about a teacher."""
    data = found.get("data") or {}
    try:
        model = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), found["model"]))
        tokens = {name: data[name] for name in ("tokenizer", "task", "languages") if name in data}
        read = OmegaConf.to_object(
            OmegaConf.merge(OmegaConf.structured(DataConfig(task="", parse_special=True)), tokens)
        )
    except Exception as error:  # the error depends on what is wrong with the text
        raise ValueError(
            f"distill.teacher={path}: {file} has no model that this release knows: {' '.join(str(error).split())}"
        ) from error
    assert isinstance(model, ModelConfig)
    assert isinstance(read, DataConfig)
    return TeacherSettings(model, read)
