"""Reward terms for how a completion is written, regardless of its answer: format, language, length and repetition."""

from __future__ import annotations

import re
import sys
from functools import cache

import numpy as np
from numpy.typing import NDArray

from grpo_mega.config.schema.terms import (
    FormatOptions,
    LanguageOptions,
    LengthOptions,
    NoOptions,
    OverlongOptions,
    RepetitionOptions,
)
from grpo_mega.reward.extract import PREFILLED, boxed
from grpo_mega.reward.verdict import Verdict
from grpo_mega.types import Sample

_HAN = r"\u3005\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
RANGES = {
    "latin": r"A-Za-z\u00aa\u00ba\u00c0-\u02af\u1e00-\u1eff\u2c60-\u2c7f\ua722-\ua7ff\uab30-\uab68\ufb00-\ufb06"
    r"\uff21-\uff3a\uff41-\uff5a",
    "cyrillic": r"\u0400-\u052f\u1c80-\u1c8f\u2de0-\u2dff\ua640-\ua69f",
    "greek": r"\u0370-\u03ff\u1f00-\u1fff",
    "arabic": r"\u0600-\u06ff\u0750-\u077f\u0870-\u08ff\ufb50-\ufdff\ufe70-\ufeff",
    "hebrew": r"\u0590-\u05ff\ufb1d-\ufb4f",
    "devanagari": r"\u0900-\u097f\ua8e0-\ua8ff",
    "bengali": r"\u0980-\u09ff",
    "tamil": r"\u0b80-\u0bff",
    "thai": r"\u0e00-\u0e7f",
    "georgian": r"\u10a0-\u10ff\u1c90-\u1cbf\u2d00-\u2d2f",
    "armenian": r"\u0530-\u058f\ufb13-\ufb17",
    "chinese": _HAN + r"\u3100-\u312f\u31a0-\u31bf",
    "japanese": _HAN + r"\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f",
    "korean": r"\u1100-\u11ff\u3130-\u318f\ua960-\ua97f\uac00-\ud7ff\uffa0-\uffdc",
}
"""Script -> Unicode ranges of its letters, as in a character class."""
_MARKUP = re.compile(r"\\[A-Za-z]+|</?[A-Za-z_]+>")


def language(sample: Sample, options: LanguageOptions) -> float:
    r"""Share of a completion's letters that belong to a script; 0.0 for a completion without letters.

    After the language consistency of DeepSeek-R1 (arXiv 2501.12948, section 2.3.2), which uses the share of words. Tags
    and LaTeX commands (`\frac`) are ignored. Languages with the same script are not distinguished.
    """
    # The table covers all of Unicode and is built once per script, so that each character costs one lookup.
    points = np.frombuffer(_MARKUP.sub("", sample.text).encode("utf-32-le", "surrogatepass"), "<u4")
    _, others, belong = np.bincount(_table(options.script)[points], minlength=3)
    return float(belong / (others + belong)) if others + belong else 0.0


@cache
def _table(script: str) -> NDArray[np.uint8]:
    """Lookup table by code point: 0 for non-letters, 2 for letters of the script, 1 for other letters."""
    signs = "".join(map(chr, range(sys.maxunicode + 1)))
    table = np.fromiter(map(str.isalpha, signs), np.uint8, len(signs))
    # Doubling leaves digits and punctuation in the script's ranges at 0, as they are no letters.
    table[[sign.start() for sign in re.finditer(f"[{RANGES[script]}]", signs)]] *= 2
    return table


def length(sample: Sample, options: LengthOptions) -> float:
    """0 for completions of at most `low` sampled tokens, 1 from `high` tokens, linear in between."""
    value = (sample.sampled - options.low) / (options.high - options.low)
    return min(max(value, 0.0), 1.0)


def overlong(sample: Sample, options: OverlongOptions) -> float:
    """Soft overlong punishment of DAPO (arXiv 2503.14476, equation 13): from 0 to -1 before the length limit."""
    free = options.limit - options.buffer
    return min(max((free - sample.sampled) / options.buffer, -1.0), 0.0)


def repetition(sample: Sample, options: RepetitionOptions) -> float:
    """Minus the share of the completion's `size`-grams of tokens that repeat an earlier one, in (-1, 0].

    0 for a completion shorter than `size` tokens.
    """
    return -sample.repeated(options.size)


# Each character is matched only where no tag begins, so that neither part can contain a second pair.
_THOUGHTS = r"(?:(?!</?think>).)+"
_ANSWER = r"(?:(?!</?(?:think|answer)>).)+"
_FORMAT = re.compile(rf"\s*<think>({_THOUGHTS})</think>\s*<answer>({_ANSWER})</answer>\s*", re.DOTALL)
_STRICT = re.compile(rf"\s*<think>({_ANSWER})</think>\s*<answer>({_ANSWER})</answer>\s*", re.DOTALL)


def think_answer_format(sample: Sample, strict: bool = False) -> float:
    """1.0 when the whole completion is `<think>...</think> <answer>...</answer>`, else 0.0.

    Both contents must hold more than white space and no further tags; white space around the pairs is ignored. Thoughts
    may mention the answer's tags, unless `strict`. The completion must have stopped by itself: one cut by the length
    limit scores 0 regardless of its format. A prompt that ends with `<think>` has begun the completion.
    """
    # Chat templates such as those of R1's distilled models end the prompt with `<think>`.
    prefilled = PREFILLED.search(sample.prompt.text)
    text = f"<think>{sample.text}" if prefilled else sample.text
    match = (_STRICT if strict else _FORMAT).fullmatch(text)
    stopped = sample.finish_reason == "stop"
    return float(stopped and match is not None and all(part.strip() for part in match.groups()))


def environment(sample: Sample, options: NoOptions) -> Verdict:
    """What the environment's `get_reward` gave for the sample.

    Where the environment rewards turns, each is a step. The last token also has what `get_reward` gave beyond them.
    """
    if sample.reward is None:
        return Verdict(0.0, unscorable="the environment gave no reward")
    if all(call.reward is None for call in sample.calls):
        return Verdict(sample.reward)
    # A call before the first rewarded one may have no reward.
    rewards = [call.reward or 0.0 for call in sample.calls]
    last = len(sample.token_ids) - 1
    # A turn ends where its reply begins; the last call may have none.
    turns = dict(zip([*(first - 1 for first, _ in sample.given), last], rewards, strict=False))
    turns[last] = turns.get(last, 0.0) + sample.reward - sum(rewards)
    return Verdict(sample.reward, turns=tuple(turns.items()))


def in_template(sample: Sample, options: FormatOptions) -> float:
    r"""1.0 when the completion has the format named by the options, else 0.0.

    For the format boxed, the completion must have stopped by itself and have a `\boxed{...}` that is not empty.
    """
    if options.template == "think_answer":
        return think_answer_format(sample, options.strict)
    return float(sample.finish_reason == "stop" and bool((boxed(sample.text, options.strict) or "").strip()))
