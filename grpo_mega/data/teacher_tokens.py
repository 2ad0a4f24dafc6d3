"""Checks that a teacher has the policy's tokens: otherwise its log-probs of the policy's samples are meaningless."""

from __future__ import annotations

from grpo_mega.config.schema import Config
from grpo_mega.config.trained_model import TrainedModel
from grpo_mega.data import build_tokenizer
from grpo_mega.data.tokenizer import Tokenizer, vocabulary

INSTEAD = (
    "learn from its samples instead (tools/evaluate.py, tools/rejection_sample.py, sft.path: docs/recipes.md), or name "
    "a teacher with the same tokens"
)


def teacher_vocabulary(config: Config, teacher: TrainedModel, tokenizer: Tokenizer) -> int:
    """Vocabulary size of the teacher, after checking that it has the policy's tokens with the same ids.

    Raises:
        ValueError: The teacher's tokenizer differs or cannot be read, or it does not score all tokens that the policy
            samples; names the first differing token.
    """
    name = f"distill.teacher={config.distill.teacher}"
    try:
        theirs = build_tokenizer(teacher.data)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{name}: its tokenizer, data.tokenizer={teacher.data.tokenizer}, is missing: {error}"
        ) from error
    if different := _difference(theirs.token_ids(), tokenizer.token_ids()):
        raise ValueError(
            f"{name} has other tokens than the policy (data.tokenizer={config.data.tokenizer}): {different}; {INSTEAD}"
        )
    scored, sampled = vocabulary(teacher.model, theirs), vocabulary(config.model, tokenizer)
    if scored < sampled:
        raise ValueError(
            f"{name} scores {scored} tokens, and the policy samples from {sampled} (model.vocab_size): {INSTEAD}"
        )
    return scored


def _difference(theirs: dict[str, int], ours: dict[str, int]) -> str:
    """First token whose id differs between the vocabularies; empty when there is none."""
    for token in sorted({*theirs, *ours}, key=lambda token: (ours.get(token, len(ours)), token)):
        if theirs.get(token) != ours.get(token):
            ids = [str(of.get(token, "no token")) for of in (theirs, ours)]
            return f"{token!r} is {ids[0]} there and {ids[1]} here"
    return ""
