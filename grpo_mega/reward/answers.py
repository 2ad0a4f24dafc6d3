"""Reward terms that compare the final answer of a completion with the ground truth."""

from __future__ import annotations

import re
from collections.abc import Sequence

from grpo_mega.config.schema.terms import ExactOptions, NoOptions, ReadOptions
from grpo_mega.reward.extract import answer_tag, boxed, final_answer
from grpo_mega.reward.format import think_answer_format
from grpo_mega.reward.verify import equivalent
from grpo_mega.types import Prompt, Sample

_NUMBER = re.compile(
    r"(?<![\w.)])[-\u2212]?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:/[0-9]+)?%?"
    r"|[0-9]+(?:\.[0-9]+)?%?"
)
_STATED = re.compile(
    r"\b(?i:answer)(?i:\s++(?:is|should\s++be))?+\s*+(?:[:=]\s*+)?+[*$]*+"
    r"(?:\\(?:boxed|text|textbf|mathrm)\{)*+\(?+([A-Z])\b"
    r"(?!(?<=[AI]) +[a-z])"
)
"""Pattern of an option stated as the answer. After "the answer is", a or i before a word is not an option.

All quantifiers are possessive, so that the time is linear in the length of white space."""
_OPTION = re.compile(r"\(?([A-Za-z])(?:[).:]+|$)\s*(.*)", re.DOTALL)
_UPRIGHT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")


def accuracy(sample: Sample, _: NoOptions) -> float:
    """1.0 when the completion has the strict format and its only answer tag holds the ground truth."""
    if not think_answer_format(sample):
        return 0.0
    answer = answer_tag(sample.text)
    return float(answer is not None and equivalent(answer, sample.prompt.answer))


def boxed_accuracy(sample: Sample, _: NoOptions) -> float:
    r"""1.0 when the completion's only `\boxed{...}` holds the ground truth; no other format is required."""
    answer = boxed(sample.text)
    return float(answer is not None and equivalent(answer, sample.prompt.answer))


def last_number(sample: Sample, _: NoOptions) -> float:
    """1.0 when the last number of a completion that stopped by itself equals the ground truth."""
    number = number_in(sample)
    return float(number is not None and equivalent(number, sample.prompt.answer))


def number_in(sample: Sample) -> str | None:
    """Last number of a completion that stopped by itself; None when there is none."""
    numbers = _NUMBER.findall(final_answer(sample, "text") or "")
    return numbers[-1].replace("\u2212", "-") if numbers else None


def exact(sample: Sample, options: ExactOptions) -> float:
    """1.0 when the answer equals the ground truth as text; runs of white space count as one space and are trimmed."""
    answer, truth = (
        " ".join((text or "").split()) for text in (final_answer(sample, options.read), sample.prompt.answer)
    )
    if options.ignore_case:
        answer, truth = answer.casefold(), truth.casefold()
    return float(answer == truth != "")


def multiple_choice(sample: Sample, options: ReadOptions) -> float:
    """1.0 when the answer names the option that the ground truth names, by letter or text.

    The problem's metadata has the texts of the options in a list, `choices`, whose first entry is A.

    Raises ValueError when the ground truth names no option.
    """
    return float(right_option(sample.prompt) == chosen_option(sample, options))


def chosen_option(sample: Sample, options: ReadOptions) -> str | None:
    """Capital letter of the option that a completion chooses; None when it chooses none or several.

    When the whole completion is read, the answer is the option that it states ("the answer is (B)"), or the text itself
    if it is only an option.
    """
    choices = sample.prompt.metadata.get("choices", ())
    answer = final_answer(sample, options.read) or ""
    chosen = {option(answer, choices)} - {None}
    if not chosen and options.read == "text":
        chosen = {letter for letter in _STATED.findall(answer) if not choices or _index(letter) < len(choices)}
    return chosen.pop() if len(chosen) == 1 else None


def right_option(prompt: Prompt) -> str:
    """Capital letter of the correct option of a problem. Raises ValueError when its answer names no option."""
    choices = prompt.metadata.get("choices", ())
    if not isinstance(choices, (list, tuple)) or not all(isinstance(choice, str) for choice in choices):
        raise ValueError(f"choices={choices!r} in the metadata; write a list of texts")
    truth = option(prompt.answer, choices)
    if truth is None:
        raise ValueError(f"the answer {prompt.answer!r} names none of the options {[*choices] or 'A to Z'}")
    return truth


def option(text: str, choices: Sequence[str]) -> str | None:
    """Capital letter of the option that a text stands for, by letter or text; None when it is not an option.

    A letter followed by a text, `(B) Paris`, counts if the text is that of the option, where the texts are known.
    """
    text = _plain(text)
    texts = [_plain(choice).casefold() for choice in choices]
    if texts.count(text.casefold()) == 1:
        return chr(ord("A") + texts.index(text.casefold()))
    match = _OPTION.fullmatch(text)
    if not match or (choices and _index(match[1].upper()) >= len(choices)):
        return None
    letter, rest = match[1].upper(), match[2].casefold()
    return letter if not rest or not choices or rest == texts[_index(letter)] else None


def _index(letter: str) -> int:
    return ord(letter) - ord("A")


def _plain(text: str) -> str:
    """The text without LaTeX fonts, dollars, stars, a final full stop, and surrounding white space."""
    for _ in range(3):  # nested fonts; a completion may nest thousands, which takes quadratic time
        text = _UPRIGHT.sub(r"\1", text)
    text = " ".join(text.replace("$", " ").replace("*", " ").split())
    return text.removesuffix(".")
