"""Rewards of a completion's steps: converts step ends from characters (terms) to tokens (process supervision)."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_mega.reward.verdict import Verdict
from grpo_mega.step_ends import Decode, last_tokens
from grpo_mega.types import Sample


def steps_of_tokens(
    sample: Sample, verdicts: Sequence[tuple[float, Verdict]], decode: Decode
) -> tuple[tuple[int, float], ...]:
    """Steps of all terms together, in the format of `Score.steps`.

    A term without steps counts as one step that ends with the completion and is rewarded with the term's value. Rewards
    of steps that end at the same token are summed.

    Args:
        sample: The sample.
        verdicts: (weight, verdict) of each of its terms; terms of weight 0 are ignored.
        decode: Decodes token ids to text.

    Returns:
        (index of last token, reward) of each step; () when no term has steps.
    """
    weighted = [(weight, verdict) for weight, verdict in verdicts if weight]
    ends = sorted({end for _, verdict in weighted for end, _ in verdict.steps})
    if not ends:
        return ()
    # The text is without the stop token.
    spelled = sample.token_ids[:-1] if sample.finish_reason == "stop" else sample.token_ids
    token_of = dict(zip(ends, last_tokens(sample.text, spelled, decode, ends), strict=True))
    rewards: dict[int, float] = {}
    for weight, verdict in weighted:
        steps = [(token_of[end], reward) for end, reward in verdict.steps]
        for token, reward in steps or [(len(sample.token_ids) - 1, verdict.value)]:
            rewards[token] = rewards.get(token, 0.0) + weight * reward
    return tuple(sorted(rewards.items()))
