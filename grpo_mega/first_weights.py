"""Initial weights of a run: from a checkpoint, a Hugging Face folder, or random; and those of its reward model."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mega.checkpoint import checkpoint
from grpo_mega.checkpoint.model_state import folder_of
from grpo_mega.config.reward_model import check_reward_model, read_reward_model
from grpo_mega.config.schema import Config, ModelConfig
from grpo_mega.convert.source import find, holds_reward_model
from grpo_mega.data.check_models import check_reward_model_state
from grpo_mega.data.tokenizer import Tokenizer, vocabulary
from grpo_mega.models.policy import Policy
from grpo_mega.models.scalar import REWARD_MODEL, ScalarModel
from grpo_mega.models.topology import Topology
from grpo_mega.observe.run_dir import has_checkpoints
from grpo_mega.platform import Platform
from grpo_mega.platform.collectives import from_main_rank
from grpo_mega.platform.manifest import MANIFEST
from grpo_mega.weights import directory as huggingface

logger = logging.getLogger(__name__)


def check_origin(config: Config, path: Path, vocab_size: int) -> None:
    """Checks the source of the initial weights, before the run directory `path` is created.

    A run that resumes from its own checkpoints does not need it.

    Raises:
        FileNotFoundError: There is neither a checkpoint nor a Hugging Face model.
        ValueError: The Hugging Face model is of another shape; raised on every rank.
    """
    if config.run.init_from is None:
        return
    origin = Path(config.run.init_from)
    if huggingface.is_model(origin):
        if problem := from_main_rank(lambda: _unlike(origin, config.model, path, vocab_size)):
            raise ValueError(problem)
    elif not (origin / checkpoint.STATE).is_file():
        raise FileNotFoundError(
            f"run.init_from={origin} holds no checkpoint (no {checkpoint.STATE}), and no Hugging Face model (no "
            f"{huggingface.CONFIG})"
        )


def _is_folder(origin: Path) -> bool:
    """Whether the weights are in a Hugging Face folder; an imported one has a config.json, but is a checkpoint."""
    return huggingface.is_model(origin) and not (origin / checkpoint.STATE).is_file()


def _unlike(origin: Path, model: ModelConfig, path: Path, vocab_size: int) -> str | None:
    """Mismatch of a Hugging Face model with the configuration; None if there is none, or the run has checkpoints."""
    if has_checkpoints(path):
        return None
    try:
        huggingface.check_architecture(origin, model, vocab_size, has_weights=_is_folder(origin))
    except ValueError as error:
        return str(error)
    except Exception as error:  # the other ranks must learn of any problem with a file
        return f"{origin} cannot be loaded: {type(error).__name__}: {error}"
    return None


def load_first_weights(config: Config, policy: Policy) -> None:
    """Loads the initial weights of the first stage into the policy, unless that stage is the base model's."""
    if config.base.train:
        return
    if config.run.init_from:
        origin = Path(config.run.init_from)
        (huggingface if _is_folder(origin) else checkpoint).load_weights(origin, policy)
        policy.initialize_adapters(config.run.seed)
    else:
        logger.warning("starting from random weights: base.train is false and run.init_from null")
        policy.initialize(config.run.seed)


def load_first_body(config: Config, model: ScalarModel) -> None:
    """Loads the body of a language model into a reward model, with a head of 0; or, from a reward model's checkpoint,
    body and head, to train it further (iterative GRPO, arXiv 2402.03300, section 4.1.4).
    """
    model.initialize(config.run.seed)
    model.reset_head()
    if config.run.init_from is None:
        logger.warning("starting from random weights: run.init_from is null")
        return
    origin = Path(config.run.init_from)
    if _is_folder(origin):
        huggingface.load_weights(origin, model, whole=config.model)
    elif from_main_rank((origin / folder_of(model.role)).is_dir):
        checkpoint.load_weights(origin, model)
    else:
        with model.chunks.body_alone():
            checkpoint.load_weights(origin, model, role="policy")


@dataclass(frozen=True)
class FoundRewardModel:
    """The reward model of `reward.model.path`: checked, but not loaded yet.

    Attributes:
        path: Checkpoint of the reward model.
        model: Architecture of the reward model.
        vocab_size: Vocabulary size.
        stage: State of the stage that trained it.
        checksum: SHA-256 of the checkpoint's manifest, which has the checksums of all files.
    """

    path: Path
    model: ModelConfig
    vocab_size: int
    stage: dict[str, Any]
    checksum: str

    @property
    def separators(self) -> list[str]:
        """Separators of the steps that it scores; empty for a model that scores whole answers."""
        return self.stage.get("separators", [])


def find_reward_model(config: Config, tokenizer: Tokenizer) -> FoundRewardModel | None:
    """Finds and checks a run's reward model; None without one. Every rank must call it.

    Raises:
        FileNotFoundError: The path does not exist.
        ValueError: The path has no reward model, or one with another tokenizer, of a shape that the layout cannot
            split, or without the scale that `reward.model.normalize` needs; or settings need scores of steps, which it
            lacks, or rewards that are never negative.
    """
    if config.reward.model.path is None:
        return None
    path = Path(config.reward.model.path)
    if not from_main_rank(lambda: holds_reward_model(path)):
        raise ValueError(
            f"reward.model.path={path} holds no reward model; name the directory of a run with "
            "run.trains=reward_model or process_reward_model, or one of its checkpoints"
        )
    source = find(path, REWARD_MODEL)
    model = read_reward_model(config) or config.model
    check_reward_model(config, model)
    state: dict[str, Any] = source.state["stage"]
    check_reward_model_state(config, source.path, state, tokenizer)
    checksum = hashlib.sha256(from_main_rank((source.path / MANIFEST).read_bytes)).hexdigest()
    return FoundRewardModel(source.path, model, vocabulary(model, tokenizer), state, checksum)


def load_reward_model(config: Config, found: FoundRewardModel, topology: Topology, platform: Platform) -> ScalarModel:
    """Loads the reward model, frozen, under the policy's layout."""
    parallel = (topology, platform, config.optimizer.distributed, False)
    scorer = ScalarModel(REWARD_MODEL, found.model, config.layout, found.vocab_size, *parallel, trained=False)
    checkpoint.load_weights(found.path, scorer)
    return scorer
