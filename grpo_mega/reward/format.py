"""Format rewards: thinking and answer in tags, as in DeepSeek-R1-Zero (section 2.2), or an answer in a box."""

from __future__ import annotations

import re

from grpo_mega.config.schema.terms import FormatOptions
from grpo_mega.reward.extract import boxed
from grpo_mega.types import Sample

_CONTENT = r"(?:(?!</?(?:think|answer)>).)+"
_FORMAT = re.compile(rf"\s*<think>({_CONTENT})</think>\s*<answer>({_CONTENT})</answer>\s*", re.DOTALL)


def think_answer_format(sample: Sample) -> float:
    """1.0 when the whole completion is `<think>...</think> <answer>...</answer>`, else 0.0.

    Both contents must hold more than white space and none of the tags; white space around the pairs is ignored. The
    completion must have stopped by itself: one cut by the length limit scores 0 whatever it looks like.
    """
    match = _FORMAT.fullmatch(sample.text)
    stopped = sample.finish_reason == "stop"
    return float(stopped and match is not None and all(part.strip() for part in match.groups()))


def boxed_format(sample: Sample) -> float:
    r"""1.0 when the completion stopped by itself and has one `\boxed{...}` that is not empty, else 0.0."""
    return float(sample.finish_reason == "stop" and bool((boxed(sample.text) or "").strip()))


def in_template(sample: Sample, options: FormatOptions) -> float:
    """1.0 when the completion has the format named by the options, else 0.0."""
    return think_answer_format(sample) if options.template == "think_answer" else boxed_format(sample)
