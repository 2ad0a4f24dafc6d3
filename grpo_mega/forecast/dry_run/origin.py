"""Checks of a run's initial weights: a Hugging Face folder, an imported one, or a checkpoint of another run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grpo_mega import platform
from grpo_mega.config.recorded import run_of, written
from grpo_mega.config.schema import REWARD_MODELS, Config
from grpo_mega.config.trained_model import check_reward_model, check_teacher, read_reward_model, read_teacher
from grpo_mega.data.check_models import check_reward_model_state, teacher_vocabulary
from grpo_mega.data.tokenizer import Tokenizer
from grpo_mega.forecast.dry_run.machine import run_directory
from grpo_mega.forecast.dry_run.problems import Problems
from grpo_mega.observe.run_dir import CHECKPOINTS, has_checkpoints
from grpo_mega.platform.manifest import MANIFEST

TOKENIZER = "tokenizer.json"


def check_origin(config: Config, vocab_size: int | None, problems: Problems) -> None:
    """Checks that the initial weights are complete, and match the configuration's model.

    A run that resumes from its own checkpoints does not need them.

    Raises:
        FileNotFoundError: There is neither a checkpoint nor a Hugging Face folder.
        ValueError: config.json, or the name, shape or dtype of a tensor, is of another model.
        ImportError: torch or Megatron, needed for reading, is not installed here.
    """
    origin = Path(config.run.init_from or "")
    if config.base.train or not config.run.init_from or not origin.exists() or has_checkpoints(run_directory(config)):
        return
    platform.start_planning()
    from grpo_mega.checkpoint.checkpoint import STATE
    from grpo_mega.weights.directory import CONFIG, Reader, check_architecture, is_model

    is_checkpoint = (origin / STATE).is_file()
    if not is_checkpoint and not is_model(origin):
        raise FileNotFoundError(
            f"run.init_from={origin} holds no checkpoint (no {STATE}), and no Hugging Face model (no {CONFIG}); name "
            "another folder"
        )
    if is_checkpoint:
        _check_checkpoint(config, origin, vocab_size, problems)
    if is_model(origin):
        check_architecture(origin, config.model, vocab_size, has_weights=not is_checkpoint)
    if vocab_size and not is_checkpoint:
        Reader(origin, config.model, vocab_size)


def check_distillation(config: Config, tokenizer: Tokenizer | None) -> None:
    """Checks that the teacher, if any, can be split by the layout, and has the policy's tokens.

    Raises:
        ValueError: A check fails, or the path is not a model.
    """
    if not config.distill.teacher or not Path(config.distill.teacher).exists():  # already reported
        return
    if teacher := read_teacher(config):
        check_teacher(config, teacher)
        if tokenizer:
            teacher_vocabulary(config, teacher, tokenizer)


def check_learned_reward(config: Config, tokenizer: Tokenizer | None) -> None:
    """Checks that the reward model, if any, is intact, can be split by the layout, and has the policy's tokens.

    Raises:
        ValueError: A check fails.
    """
    path = Path(config.reward.model.path or "")
    if config.reward.model.path is None or not path.exists():  # already reported
        return
    platform.start_planning()
    from grpo_mega.checkpoint.checkpoint import STATE
    from grpo_mega.checkpoint.contents import check_files
    from grpo_mega.checkpoint.model_state import folder_of
    from grpo_mega.models.scalar import REWARD_MODEL

    folder = folder_of(REWARD_MODEL)
    own = [path] if (path / STATE).is_file() else sorted((path / CHECKPOINTS).glob("step-*"))
    whole = [each for each in own if (each / folder).is_dir() and (each / MANIFEST).is_file()]
    if not whole:
        raise ValueError(
            f"reward.model.path={path} holds no reward model that is finished; name the directory of a run with "
            "run.trains=reward_model or process_reward_model, or one of its checkpoints"
        )
    check_files(whole[-1], folder)
    if model := read_reward_model(config):
        check_reward_model(config, model)
    if tokenizer:
        state = json.loads((whole[-1] / STATE).read_text())["stage"]
        check_reward_model_state(config, whole[-1], state, tokenizer)


def _check_checkpoint(config: Config, origin: Path, vocab_size: int | None, problems: Problems) -> None:
    """Adds the problems of a checkpoint: its files, the shapes of its tensors, the tokenizer it was trained with."""
    from grpo_mega.checkpoint.checkpoint import STATE
    from grpo_mega.checkpoint.contents import check_beside_weights, check_files, check_weights
    from grpo_mega.checkpoint.model_state import POLICY, folder_of
    from grpo_mega.models.scalar import REWARD_MODEL
    from grpo_mega.weights.directory import is_model

    before = len(problems.found)
    continued = config.run.trains in REWARD_MODELS and (origin / folder_of(REWARD_MODEL)).is_dir()
    problems.attempt("run.init_from", lambda: check_files(origin, folder_of(REWARD_MODEL) if continued else POLICY))
    whole = len(problems.found) == before
    if Path(config.data.tokenizer) != origin:  # otherwise reading the tokenizer has checked them
        problems.attempt("run.init_from", lambda: check_beside_weights(origin))
    if whole and vocab_size and not continued and not is_model(origin):  # of an imported model, config.json is compared
        problems.attempt("run.init_from", lambda: check_weights(origin, config.model, vocab_size))
    problems.attempt("run.init_from", lambda: _check_tokenizer(origin, origin / STATE, config.data.tokenizer))


def _check_tokenizer(origin: Path, state_file: Path, tokenizer: str) -> None:
    """Raises ValueError when the run that wrote a checkpoint is known to have had another tokenizer."""
    state = json.loads(state_file.read_text())
    trained = (state.get("config") or written(run_of(origin.absolute()))).get("data", {}).get("tokenizer")
    if trained in (None, tokenizer):
        return
    theirs, ours = (_tokens(Path(folder) / TOKENIZER) for folder in (trained, tokenizer))
    if "chars" in (trained, tokenizer) or (theirs and ours and theirs != ours):
        raise ValueError(
            f"run.init_from={origin} was trained with data.tokenizer={trained}, whose tokens are others than those of "
            f"data.tokenizer={tokenizer}; set data.tokenizer={trained}"
        )


def _tokens(file: Path) -> tuple[Any, ...] | None:
    """Tokens of a tokenizer.json with their ids, the special ones, and the text processing around them.

    Independent of the file's formatting; None if it cannot be read, which is reported where it is needed.
    """
    from tokenizers import Tokenizer

    try:
        read = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception:  # a bare Exception is what tokenizers raises
        return None
    special = {i for i, token in read.get_added_tokens_decoder().items() if token.special}
    return read.get_vocab(), special, read.encode("a").ids
