"""Checks a run's teacher and reward model against its policy, before they are used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_mega.config.schema import (
    AlgorithmConfig,
    DataConfig,
    DistillConfig,
    ModelConfig,
    RewardConfig,
    RewardModelConfig,
)
from grpo_mega.config.trained_model import TrainedModel
from grpo_mega.data import build_tokenizer
from grpo_mega.data.tokenizer import Tokenizer, fingerprint, vocabulary
from grpo_mega.errors import InputError

INSTEAD = (
    "learn from its samples instead (tools/evaluate.py, tools/rejection_sample.py, sft.path: docs/recipes.md), or "
    "choose a teacher with the same tokens"
)


def teacher_vocabulary(
    teacher: TrainedModel, tokenizer: Tokenizer, distill: DistillConfig, data: DataConfig, model: ModelConfig
) -> int:
    """Vocabulary size of the teacher, after checking that it has the policy's tokens with the same ids.

    Raises:
        InputError: The teacher's tokenizer differs or cannot be read, or it does not score all tokens that the policy
            samples; names the first differing token.
    """
    name = f"distill.teacher={distill.teacher}"
    try:
        theirs = build_tokenizer(teacher.data)
    except (ValueError, OSError) as error:
        what = f"its tokenizer, data.tokenizer={teacher.data.tokenizer}, cannot be read: {error}"
        raise InputError(name, what, "put it back, or choose another teacher") from error
    their_ids, our_ids = theirs.token_ids(), tokenizer.token_ids()
    # In the order of our ids, so that the message names the first token where the vocabularies part.
    for token in sorted({*their_ids, *our_ids}, key=lambda token: (our_ids.get(token, len(our_ids)), token)):
        if their_ids.get(token) != our_ids.get(token):
            there, here = (ids.get(token, "no token") for ids in (their_ids, our_ids))
            different = f"{token!r} is {there} there and {here} here"
            what = f"its tokens differ from the policy's (data.tokenizer={data.tokenizer}): {different}"
            raise InputError(name, what, INSTEAD)
    scored, sampled = vocabulary(teacher.model, theirs), vocabulary(model, tokenizer)
    if scored < sampled:
        what = f"scores {scored} tokens, and the policy samples from {sampled} (model.vocab_size)"
        raise InputError(name, what, INSTEAD)
    return scored


def check_reward_model_state(
    checkpoint: Path,
    state: dict[str, Any],
    tokenizer: Tokenizer,
    reward: RewardConfig,
    algorithm: AlgorithmConfig,
    data: DataConfig,
) -> None:
    """Compares the state of the stage that trained `reward.model.path` with the policy's tokenizer and settings.

    Raises:
        InputError: The reward model has another tokenizer, or lacks the scale that `reward.model.normalize` needs; or
            settings need scores of steps, which it lacks, or rewards that are never negative.
    """
    path = reward.model.path
    if state["tokenizer"] != fingerprint(tokenizer):
        raise InputError(
            f"reward.model.path={path}",
            f"trained with another tokenizer than data.tokenizer={data.tokenizer}: it would read other words "
            "than the policy writes",
            "train one with this tokenizer",
        )
    # Only a process reward model has separators; everything below is about scores of whole completions.
    if "separators" in state:
        return
    of_steps = {
        "algorithm.supervision": (algorithm.supervision, "outcome"),
        "reward.model.outcome": (reward.model.outcome, RewardModelConfig.outcome),
    }
    for name, (value, fix) in of_steps.items():
        if value != fix:
            raise InputError(
                f"{name}={value}",
                f"needs scores of steps, and reward.model.path={path} scores whole completions",
                f"choose a run with run.trains=process_reward_model, or set {name}={fix}",
            )
    if algorithm.advantage_std == "mean":
        raise InputError(
            "algorithm.advantage_std=mean",
            "divides by the mean reward of a group, so no reward may be negative, and the scores of "
            f"reward.model.path={path} may be, as it scores whole completions",
            "set algorithm.advantage_std=sample or none, or choose a run with run.trains=process_reward_model, whose "
            "scores are probabilities",
        )
    if not reward.model.normalize:
        return
    if not state["scale"]:
        raise InputError(
            str(checkpoint),
            "its training has not ended, and only the end measures the scale by which scores are normalised",
            "let it end, or set reward.model.normalize=false",
        )
    if not state["scale"]["std"] > 0:
        what = "gives every response the same score, which no deviation can normalise"
        raise InputError(str(checkpoint), what, "train it for longer")
