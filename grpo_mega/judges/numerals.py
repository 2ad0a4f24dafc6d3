"""Number words for the working of chain sums: `three+five=eight`, `三+五=八`.

A model that has read two languages mixes them when only its answers are rewarded, as DeepSeek-R1-Zero did (arXiv
2501.12948, section 2.2.4); the reward `language` keeps it to one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

NUMERALS = {
    "english": ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    "chinese": ("零", "一", "二", "三", "四", "五", "六", "七", "八", "九"),
}
"""Language -> words for the digits 0 to 9."""
STAYS = 0.8
"""Probability that a step of the working is in the same language as the step before; else its language is drawn
anew."""

_WORDS = {language: dict(enumerate(words, ord("0"))) for language, words in NUMERALS.items()}
_DIGITS = {word: str(digit) for words in NUMERALS.values() for digit, word in enumerate(words)}
_WORD = re.compile("|".join(_DIGITS))


def in_words(working: str, languages: Sequence[str], rng: random.Random) -> str:
    """Replaces the digits of a working by words: `3+5=8;8+2=10` becomes, say, `three+five=eight;八+二=一零`.

    Every step is in one of `languages`, chosen with `STAYS`; without languages the working is unchanged.
    """
    if not languages:
        return working
    steps, language = [], rng.choice(languages)
    for step in working.split(";"):
        if rng.random() >= STAYS:
            language = rng.choice(languages)
        steps.append(step.translate(_WORDS[language]))
    return ";".join(steps)


def in_digits(text: str) -> str:
    """Replaces all number words of `NUMERALS` by digits."""
    return _WORD.sub(lambda word: _DIGITS[word[0]], text)
