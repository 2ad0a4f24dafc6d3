"""Initial weights of a run: from a checkpoint, a Hugging Face folder, or random; and those of its reward model."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mega.checkpoint import checkpoint
from grpo_mega.checkpoint.model_state import folder_of
from grpo_mega.config.schema import BaseConfig, Config, LayoutConfig, ModelConfig, RunConfig
from grpo_mega.config.trained_model import read_reward_model
from grpo_mega.convert.source import find
from grpo_mega.data.check_models import check_reward_model_state
from grpo_mega.data.tokenizer import Tokenizer, vocabulary
from grpo_mega.models.policy import Policy
from grpo_mega.models.scalar import REWARD_MODEL, ScalarModel
from grpo_mega.models.topology import Topology
from grpo_mega.platform import Platform
from grpo_mega.platform.collectives import from_main_rank
from grpo_mega.platform.manifest import MANIFEST
from grpo_mega.weights import directory as huggingface

logger = logging.getLogger(__name__)


def _is_folder(origin: Path) -> bool:
    """Whether the weights are in a Hugging Face folder; an imported one has a config.json, but is a checkpoint."""
    return huggingface.is_model(origin) and not (origin / checkpoint.STATE).is_file()


def load_first_weights(config: RunConfig, base: BaseConfig, policy: Policy) -> None:
    """Loads the initial weights of the first stage into the policy, unless that stage is the base model's."""
    if base.train:
        return
    if config.init_from:
        origin = Path(config.init_from)
        (huggingface if _is_folder(origin) else checkpoint).load_weights(origin, policy)
        policy.initialize_adapters(config.seed)
    else:
        logger.warning("starting from random weights: base.train is false and run.init_from null")
        policy.initialize(config.seed)


def load_first_body(config: RunConfig, whole: ModelConfig, model: ScalarModel) -> None:
    """Loads the body of a language model into a reward model, with a head of 0; or, from a reward model's checkpoint,
    body and head, to train it further (iterative GRPO, arXiv 2402.03300, section 4.1.4).

    `whole` is the architecture of the language model, of which the reward model has the body.
    """
    model.initialize(config.seed)
    model.reset_head()
    if config.init_from is None:
        logger.warning("starting from random weights: run.init_from is null")
        return
    origin = Path(config.init_from)
    if _is_folder(origin):
        huggingface.load_weights(origin, model, whole=whole)
    elif from_main_rank((origin / folder_of(model.role)).is_dir):
        checkpoint.load_weights(origin, model)
    else:
        with model.chunks.body_alone():
            checkpoint.load_weights(origin, model, role="policy")


@dataclass(frozen=True)
class CheckedRewardModel:
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
        """Separators of the steps that it scores; empty for a model that scores whole completions."""
        return self.stage.get("separators", [])


def find_reward_model(config: Config, tokenizer: Tokenizer) -> CheckedRewardModel | None:
    """Finds the newest intact checkpoint of a run's reward model; None without one. Every rank must call it.

    Raises:
        InputError: None is intact, or it lacks what these settings need.
    """
    if config.reward.model.path is None:
        return None
    source = find(Path(config.reward.model.path), REWARD_MODEL)
    model = read_reward_model(config.reward, config.model) or config.model
    state: dict[str, Any] = source.state["stage"]
    # It may be an older checkpoint than the one that was checked, which may be damaged.
    check_reward_model_state(source.path, state, tokenizer, config.reward, config.algorithm, config.data)
    checksum = hashlib.sha256(from_main_rank((source.path / MANIFEST).read_bytes)).hexdigest()
    return CheckedRewardModel(source.path, model, vocabulary(model, tokenizer), state, checksum)


def load_reward_model(
    checked: CheckedRewardModel, layout: LayoutConfig, topology: Topology, platform: Platform
) -> ScalarModel:
    """Loads the reward model, frozen, under the policy's layout."""
    here = (layout, checked.vocab_size, topology, platform)
    scorer = ScalarModel(REWARD_MODEL, checked.model, *here, optimizer=None)
    checkpoint.load_weights(checked.path, scorer)
    return scorer
