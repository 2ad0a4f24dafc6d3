r"""Detects ground truths that no completion can match, before training, with the reward itself.

A run on such problems learns the format and nothing else, and its accuracy stays at zero for no visible reason.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence

from grpo_mega.config.schema import RewardTerm
from grpo_mega.config.schema.terms import NoOptions
from grpo_mega.judges.math.verify import MAX_CHARACTERS
from grpo_mega.reward.extract import boxed
from grpo_mega.reward.kinds import FORMULAS
from grpo_mega.types import Prompt, Sample

IDEAL = {
    "accuracy": "<think>...</think><answer>{}</answer>",
    "boxed": r"\boxed{{{}}}",
    "stated": "Answer: {}",
    "last_number": "{}",
}
"""Kind of term -> completion that scores 1, with {} for the ground truth."""
_PLAIN = re.compile(r"-?[1-9][0-9]{0,14}|0")
"""Truths that all of these accept: most of what there is."""
_GSM8K = re.compile(r"####\s*(.*\S)\s*\Z")


def why_unreachable(terms: Sequence[RewardTerm], truth: str) -> str | None:
    """Why no completion can match the answer `truth`, and the fix; None when one can.

    Only built-in terms that apply to all tasks are checked, as a user function may read answers in its own way.
    """
    names = {term.name: term.built_in for term in terms if term.built_in in IDEAL and not term.tasks}
    if not names or _PLAIN.fullmatch(truth):
        return None
    if not truth:
        return f"is missing, and reward term {min(names)!r} compares with it; name its column: data.sources.NAME.answer"
    if solution := _GSM8K.search(truth):
        return f"is a whole solution of GSM8K's; write what follows its ####: {solution[1]!r}"
    if r"\boxed" in truth:
        inside = boxed(truth)
        return rf"holds \boxed, and is compared with what is in a box; write {inside or 'that'!r}"
    if len(truth) > MAX_CHARACTERS:
        return f"has {len(truth)} characters, and {MAX_CHARACTERS} at most are compared; write the final answer alone"
    if boxed(rf"\boxed{{{truth}}}", strict=True) != truth:
        return f"is {truth!r}, whose braces do not match; write every {{ with its }}"
    for name, kind in names.items():
        if not FORMULAS[kind](_ideal(IDEAL[kind].format(truth), truth), NoOptions()):
            return (
                f"is {truth!r}, which reward term {name!r} does not accept as an answer to itself; write a plain value"
            )
    return None


def _ideal(completion: str, truth: str) -> Sample:
    """A sample that stopped by itself after this completion."""
    prompt = Prompt(id="truth", token_ids=(), text="", answer=truth, task="")
    return Sample(prompt, 0, array("i"), array("f"), "stop", ((0, 0),), completion)
