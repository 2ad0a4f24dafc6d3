"""The further models that a run uses (a teacher, a reward model), described by their own files, and whether the run's
layout can hold them.

Neither torch nor transformers is imported: plans are made on machines without them. It is part of the configuration, as
it reads the settings of another run and only compares them with this run's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from grpo_mega.config.limits import idle_problems
from grpo_mega.config.recorded import in_todays_words, plain
from grpo_mega.config.rules.layout import layout_problems
from grpo_mega.config.rules.model import model_problems
from grpo_mega.config.rules.shared import refuse
from grpo_mega.config.schema import Config, DataConfig, DistillConfig, ModelConfig, RewardConfig
from grpo_mega.config.typed import literal
from grpo_mega.errors import InputError
from grpo_mega.models.families.hf_folder import missing, model_settings

FOLDER = "config.json"
"""File of a Hugging Face folder, and of a checkpoint imported from one."""
RUN = "config.yaml"
"""File of a run directory."""
REWARD_MODEL = "reward.model.path"
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
        InputError: The path is missing, or is not a model of a supported family; names the path, and the file or key.
    """
    path, named = Path(value), f"{setting}={value}"
    if not path.exists():
        raise missing(setting, value)
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
        # A checkpoint in its run directory is described by the run; a copy elsewhere only by itself, if at all.
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
        # Only what determines the tokens is read: the rest has no effect here, and this release may not know all of it.
        tokens = literal({name: data[name] for name in ("tokenizer", "task", "languages") if name in data})
        read = OmegaConf.to_object(
            OmegaConf.merge(OmegaConf.structured(DataConfig(task="", parse_special=True)), tokens)
        )
    # The type of the error depends on what is wrong with the text, which any release may have written.
    except Exception as error:
        what = f"this release does not support the model of {file}: {' '.join(str(error).split())}"
        raise InputError(named, what, "use the release that trained it, or choose another model") from error
    assert isinstance(model, ModelConfig)
    assert isinstance(read, DataConfig)
    return TrainedModel(model, read)


def read_teacher(distill: DistillConfig, policy: ModelConfig) -> TrainedModel | None:
    """Reads the description of `distill.teacher` from its files; None without a teacher, or with one on a server.

    Raises: see `read_trained_model`.
    """
    if not distill.teacher or distill.served:
        return None
    return read_trained_model("distill.teacher", distill.teacher, policy.context)


def check_teacher(config: Config, teacher: TrainedModel) -> None:
    """Checks that the run's layout can split the teacher, and that the teacher supports sequences as long as the run's.

    Raises:
        ConfigError: A check fails; names the fields, which are the teacher's.
    """
    context, layout, where = config.model.context, config.layout, f"distill.teacher={config.distill.teacher}"
    problems = []
    if teacher.model.context < context:
        what = f"supports sequences of {teacher.model.context} tokens, and model.context={context}"
        problems.append(InputError(where, what, f"lower model.context to {teacher.model.context}"))
    # The weights have a fixed shape, like those of run.init_from.
    run = replace(config.run, init_from=config.distill.teacher)
    # The policy may exchange tokens by DeepEP; a teacher without experts exchanges none, and the rule would refuse it.
    own = layout if teacher.model.moe.experts else replace(layout, dispatch="alltoall")
    theirs = replace(config, model=replace(teacher.model, context=context), run=run, layout=own)
    for problem in (*idle_problems(theirs, "model."), *model_problems(theirs), *layout_problems(theirs)):
        problems.append(InputError(where, f"of the teacher, {problem.where}: {problem.what}", problem.fix))
    if not (config.model.moe.experts or teacher.model.moe.experts):
        for name, size in (("layout.ep", layout.ep), ("layout.etp", layout.etp)):
            if size > 1:
                what = "neither the model nor its teacher has experts"
                problems.append(InputError(f"{name}={size}", what, f"set {name}=1"))
    refuse(problems)


def read_reward_model(reward: RewardConfig, policy: ModelConfig) -> ModelConfig | None:
    """Architecture of the run that trained `reward.model.path`, for sequences of this run's length.

    None without a reward model, and where its training configuration is missing (a checkpoint copied out of its run, or
    not yet written by an earlier stage of a recipe). It then has the policy's architecture.

    Raises:
        InputError: The run's configuration cannot be read; names it.
    """
    path = reward.model.path
    if path is None or not is_described(Path(path)):
        return None
    return replace(read_trained_model(REWARD_MODEL, path, policy.context).model, context=policy.context)


def check_reward_model(config: Config, model: ModelConfig) -> None:
    """Raises a ConfigError when the layout cannot split a reward model of this architecture.

    A reward model without experts is replicated over the ranks that share the policy's experts.
    """
    layout = config.layout if model.moe.experts else replace(config.layout, ep=1, etp=1, dispatch="alltoall")
    beside = replace(config, model=model, layout=layout)
    if problems := [*idle_problems(beside, "model."), *model_problems(beside), *layout_problems(beside)]:
        where = f"{REWARD_MODEL}={config.reward.model.path}"
        refuse(
            InputError(where, f"this run cannot hold the model: {one.where}: {one.what}", one.fix) for one in problems
        )
