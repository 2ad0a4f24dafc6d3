"""The model that a path refers to: its checkpoint, its training configuration, and its weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mega.checkpoint import checkpoint
from grpo_mega.checkpoint.integrity import checksums, damage, files_in_manifest
from grpo_mega.checkpoint.model_state import folder_of, load_into, refuse_adapters
from grpo_mega.config.load import load_recorded
from grpo_mega.config.read_only import read_under
from grpo_mega.config.recorded import plain
from grpo_mega.config.schema import Config
from grpo_mega.errors import InputError, instead_of
from grpo_mega.models.policy import Policy
from grpo_mega.models.reference import Teacher
from grpo_mega.models.scalar import REWARD_MODEL
from grpo_mega.observe.run_dir import CHECKPOINTS
from grpo_mega.observe.run_dir import CONFIG as RUN_CONFIG
from grpo_mega.platform.collectives import from_main_rank
from grpo_mega.platform.manifest import MANIFEST
from grpo_mega.weights import directory as huggingface


@dataclass(frozen=True)
class Source:
    """An intact checkpoint to export from.

    Attributes:
        path: The checkpoint.
        run: Run directory that contains it, or None.
        state: State of the checkpoint, see `Run.state_dict`; a cached base model's has its steps and configuration.
    """

    path: Path
    run: Path | None
    state: dict[str, Any]

    @property
    def stage(self) -> str | None:
        """Stage that trained the model last; None for the run's last one."""
        return checkpoint.stage_of(self.path) or (None if "step" in self.state else "pretrain")

    @property
    def steps(self) -> int:
        """Number of steps of that stage."""
        return self.state.get("step", self.state.get("steps", 0))


def find(path: Path, role: str = "policy") -> Source:
    """Finds the newest intact checkpoint of a run directory, or takes the named one; every rank must call it.

    `role` is the role of the model that the run trained.

    Raises:
        InputError: The path does not exist, has no intact checkpoint, or a reward model in place of a language model.
    """
    if not from_main_rank(path.exists):
        fix = "choose a run directory such as runs/tiny, or a checkpoint"
        raise InputError(str(path), f"does not exist{instead_of(path)}", fix)
    if role != REWARD_MODEL and from_main_rank(lambda: holds_reward_model(path)):
        raise InputError(
            str(path),
            "a reward model, which has a scalar head and writes no text",
            "choose the run of a policy, such as that of its run.init_from, and give this one to reward.model.path",
        )
    if from_main_rank((path / CHECKPOINTS).is_dir):
        newest = checkpoint.newest_whole(path / CHECKPOINTS, role)
        if newest is None:
            raise InputError(str(path), "no finished checkpoint yet", "wait for the first, after run.save_every steps")
        return Source(newest, path, _state(newest))
    if not from_main_rank((path / checkpoint.STATE).is_file):
        what = f"neither a run directory (no {CHECKPOINTS}/) nor a checkpoint (no {checkpoint.STATE})"
        raise InputError(str(path), what, "choose one")
    if problem := damage(path, checkpoint.needed(role)):
        fix = "choose another, or give the run directory for the newest intact one"
        raise InputError(str(path), f"the checkpoint is damaged: {problem}", fix)
    folder = path.absolute().parent
    # A checkpoint inside a run directory finds its configuration there; a copy elsewhere needs --config.
    run = folder.parent if folder.name == CHECKPOINTS and (folder.parent / RUN_CONFIG).is_file() else None
    return Source(path, run, _state(path))


def holds_reward_model(path: Path) -> bool:
    """Whether a run directory or checkpoint is of a run that trains a reward model, of completions or of steps."""
    folder = folder_of(REWARD_MODEL)
    return (path / folder).is_dir() or any((path / CHECKPOINTS).glob(f"*/{folder}"))


def configuration(source: Source, settings: Sequence[str], world_size: int, file: Path | None = None) -> Config:
    """Training configuration of the model, with the layout for reading it; see `read_under`.

    Args:
        source: The checkpoint.
        settings: Overrides such as layout.tp=2.
        world_size: Number of processes that share the model.
        file: The config.yaml of the run that trained it; None for that of its run directory or of a cached base model.

    Raises:
        InputError: There is no configuration, it cannot be read, or the layout does not fit the processes.
    """
    return read_under(load_recorded(_recorded(source, file)), settings, world_size)


def read(source: Source, policy: Policy, role: str) -> None:
    """Reads the weights of the model with this role into a policy without optimizer; every rank must call it.

    Raises:
        InputError: The checkpoint has no such model, or contains something that would be executed.
    """
    files = files_in_manifest(source.path)
    if not any(name.startswith(f"{folder_of(role)}/") for name in files):
        what = (
            f"it has no {role}, as the run that saved it had none (a reference needs algorithm.kl_coef above 0, an "
            "average optimizer.average_decay)"
        )
        raise InputError(str(source.path), what, "choose another checkpoint, or leave --model out for the policy")
    # Copies of a policy with adapters (reference, average) are saved as adapters only: the other weights are the
    # policy's, and come from there.
    if policy.lora and role != policy.role:
        load_into(policy, source.path, folder_of(policy.role), files)
        with policy.chunks.adapters_alone():
            load_into(policy, source.path, folder_of(role), files)
        return
    load_into(policy, source.path, folder_of(role), files)


def load_teacher(path: Path, teacher: Teacher) -> None:
    """Loads the teacher's weights, and computes its `checksum`; every rank must call it.

    Raises:
        FileNotFoundError: The path does not exist.
        InputError: The model is damaged, of another architecture, or has separate adapters.
    """
    if huggingface.is_model(path) and not (path / checkpoint.STATE).is_file():
        # An imported checkpoint also has a config.json; only a folder without the state file of checkpoints is Hugging
        # Face's.
        huggingface.load_weights(path, teacher)
        # Each rank reads its share of the files.
        files = from_main_rank(lambda: sorted(file.name for file in path.glob("*.safetensors")))
        sums = checksums(path, [huggingface.CONFIG, *files])
        teacher.checksum = hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()
        return
    found = find(path)
    refuse_adapters(found.path, folder_of("policy"))
    read(found, teacher, "policy")
    # The manifest has the checksums of all other files, so its own checksum identifies the whole model.
    manifest = from_main_rank((found.path / MANIFEST).read_bytes)
    teacher.checksum = hashlib.sha256(manifest).hexdigest()


def _state(path: Path) -> dict[str, Any]:
    return json.loads((path / checkpoint.STATE).read_text())


def _recorded(source: Source, file: Path | None) -> dict[str, Any]:
    """The recorded configuration, as plain values."""
    if file is None and source.run is None and "config" in source.state:
        return source.state["config"]
    if file is None and source.run is None:
        what = "outside of a run directory, and without the configuration that it was trained with"
        raise InputError(str(source.path), what, f"give --config FILE, the {RUN_CONFIG} of the run that trained it")
    file = file or (source.run or Path()) / RUN_CONFIG
    try:
        values = plain(file.read_text())
    except (OSError, ValueError) as error:
        raise InputError(str(file), f"cannot be read: {error}", "give --config FILE") from error
    if "model" not in values:
        raise InputError(str(file), "not the configuration of a run", "give --config FILE")
    return values
