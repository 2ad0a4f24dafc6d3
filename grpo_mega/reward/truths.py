r"""Ground truths that no completion can reach: found before training, by asking the reward itself.

A run on such problems learns the format and nothing else, and its accuracy stays at zero for no visible reason.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from grpo_mega.config.schema import RewardTerm
from grpo_mega.reward.compose import BUILT_IN
from grpo_mega.reward.extract import boxed
from grpo_mega.reward.verify import MAX_CHARACTERS
from grpo_mega.types import Prompt, Sample

IDEAL = {"accuracy": "<think>...</think><answer>{}</answer>", "boxed": r"\boxed{{{}}}"}
"""What the built-in terms that compare answers want to read."""
_GSM8K = re.compile(r"####\s*(.*\S)\s*\Z")


def why_unreachable(terms: Sequence[RewardTerm], truth: str) -> str | None:
    """Why no completion can be right when `truth` is the answer, and the way out; None when one can.

    A term of the user's own may read answers as it likes: about those nothing is said.
    """
    names = [term.name for term in terms if term.function is None and term.name in IDEAL]
    if not names:
        return None
    if solution := _GSM8K.search(truth):
        return f"is a whole solution of GSM8K's; write what follows its ####: {solution[1]!r}"
    if r"\boxed" in truth:
        inside = boxed(truth)
        return rf"holds \boxed, and is compared with what is in a box; write {inside or 'that'!r}"
    if len(truth) > MAX_CHARACTERS:
        return f"has {len(truth)} characters, and {MAX_CHARACTERS} at most are compared; write the final answer alone"
    if boxed(rf"\boxed{{{truth}}}") != truth:
        return f"is {truth!r}, whose braces do not match; write every {{ with its }}"
    for name in names:
        if BUILT_IN[name](_ideal(IDEAL[name].format(truth), truth)) != 1:
            return (
                f"is {truth!r}, which reward term {name!r} does not accept as an answer to itself; write a plain value"
            )
    return None


def _ideal(completion: str, truth: str) -> Sample:
    """A sample that stopped by itself behind this completion."""
    prompt = Prompt(id="truth", token_ids=(), text="", answer=truth, task="")
    return Sample(prompt, 0, (), (), "stop", ((0, 0),), completion)
