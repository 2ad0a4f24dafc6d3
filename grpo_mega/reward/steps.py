"""Rewards of a completion's steps, for process supervision: those of worked sums (task `chain_sum`), and the conversion
of step ends from characters, as terms give them, to tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence

from grpo_mega.config.schema.terms import NoOptions
from grpo_mega.errors import InputError
from grpo_mega.judges.numerals import in_digits
from grpo_mega.reward.verdict import Verdict
from grpo_mega.step_ends import last_tokens
from grpo_mega.types import Decode, Prompt, Sample


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
    if not ends and not any(verdict.turns for _, verdict in weighted):
        return ()
    # `Sample.text` ends before the stop token, so that token must be left out when tokens are matched with characters.
    spelled = sample.token_ids[:-1] if sample.finish_reason == "stop" else sample.token_ids
    token_of = dict(zip(ends, last_tokens(sample.text, spelled, decode, ends), strict=True))
    rewards: dict[int, float] = {}
    for weight, verdict in weighted:
        steps = [(token_of[end], reward) for end, reward in verdict.steps]
        for token, reward in steps or verdict.turns or [(len(sample.token_ids) - 1, verdict.value)]:
            rewards[token] = rewards.get(token, 0.0) + weight * reward
    return tuple(sorted(rewards.items()))


_QUESTION = re.compile(r"([0-9]+(?:\+[0-9]+)+)=\?\Z")
_STEP = re.compile(r"[0-9]+((?:\+[0-9]+)+)=[0-9]+")
_OPENING, _CLOSING = "<think>", "</think>"


def sum_steps(sample: Sample, _: NoOptions) -> Verdict:
    """Share of correct steps of a worked sum; as step rewards, 1.0 for a correct step and 0.0 for others.

    Steps are the parts between `;` in the completion's opening <think>...</think>, such as 3+5=8;8+2=10 for 3+5+2=?. A
    step is correct when it adds the next terms of the question, at least one, to the sum of the terms before. So there
    are at most as many correct steps as terms to add, and repeating one gains nothing. A completion that does not open
    with <think> has no steps and a share of 0.0. Number words count as their digits (`judges/numerals.py`).

    Raises:
        InputError: The prompt is not a sum.
    """
    left = terms_of(sample.prompt)
    if not sample.text.startswith(_OPENING):
        return Verdict(0.0)
    thought = sample.text.removeprefix(_OPENING).partition(_CLOSING)[0]
    # A wrong step still consumes as many terms as it adds, and the next one is compared with their true sum: a mistake
    # costs one step, not all that follow. Text that is no step consumes nothing.
    total, end, steps = left.pop(0), len(_OPENING), []
    for step in thought.split(";") if thought else ():
        match = _STEP.fullmatch(in_digits(step))
        added = left[: match[1].count("+")] if match else []
        wanted = f"{total}{''.join(f'+{term}' for term in added)}={total + sum(added)}"
        end += len(step)
        steps.append((end, float(bool(added) and in_digits(step) == wanted)))
        total, left, end = total + sum(added), left[len(added) :], end + len(";")
    return Verdict(sum(reward for _, reward in steps) / max(1, len(steps)), steps=tuple(steps))


def terms_of(prompt: Prompt) -> list[int]:
    """Terms of the sum in a prompt. Raises InputError when the prompt is not a sum."""
    match = _QUESTION.search(prompt.text)
    if not match:
        where = f"the prompt {prompt.text[-80:]!r}"
        raise InputError(where, "does not end as a sum does", "use sum_steps for prompts such as 3+5+2=? only")
    return [int(term) for term in match[1].split("+")]
