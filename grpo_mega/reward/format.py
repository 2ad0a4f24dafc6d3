"""Format rewards: thinking and answer in tags, as in DeepSeek-R1-Zero (section 2.2), or an answer in a box."""

from __future__ import annotations

import re

from grpo_mega.config.schema.terms import FormatOptions
from grpo_mega.reward.extract import PREFILLED, boxed
from grpo_mega.types import Sample

_THOUGHTS = r"(?:(?!</?think>).)+"
_ANSWER = r"(?:(?!</?(?:think|answer)>).)+"
_FORMAT = re.compile(rf"\s*<think>({_THOUGHTS})</think>\s*<answer>({_ANSWER})</answer>\s*", re.DOTALL)
_STRICT = re.compile(rf"\s*<think>({_ANSWER})</think>\s*<answer>({_ANSWER})</answer>\s*", re.DOTALL)


def think_answer_format(sample: Sample, strict: bool = False) -> float:
    """1.0 when the whole completion is `<think>...</think> <answer>...</answer>`, else 0.0.

    Both contents must hold more than white space and no further tags; white space around the pairs is ignored. Thoughts
    may mention the answer's tags, unless `strict`. The completion must have stopped by itself: one cut by the length
    limit scores 0 whatever it looks like. A prompt that ends with `<think>` has begun the completion.
    """
    prefilled = PREFILLED.search(sample.prompt.text)  # by the chat template, as those of R1's distilled models do
    text = f"<think>{sample.text}" if prefilled else sample.text
    match = (_STRICT if strict else _FORMAT).fullmatch(text)
    stopped = sample.finish_reason == "stop"
    return float(stopped and match is not None and all(part.strip() for part in match.groups()))


def in_template(sample: Sample, options: FormatOptions) -> float:
    r"""1.0 when the completion has the format named by the options, else 0.0.

    The format boxed is that of a completion that stopped by itself and answers in a `\boxed{...}` that is not empty.
    """
    if options.template == "think_answer":
        return think_answer_format(sample, options.strict)
    return float(sample.finish_reason == "stop" and bool((boxed(sample.text, options.strict) or "").strip()))
