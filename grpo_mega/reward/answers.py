"""Reward terms that compare the final answer of a completion with the ground truth."""

from __future__ import annotations

import re
from collections.abc import Sequence

from grpo_mega.config.schema.terms import ChoiceOptions, ExactOptions, NoOptions, StrictOptions
from grpo_mega.errors import InputError
from grpo_mega.judges.math.verify import equivalent
from grpo_mega.reward.extract import answer_tag, boxes, final_answer, unlike
from grpo_mega.reward.manner import think_answer_format
from grpo_mega.reward.verdict import Verdict
from grpo_mega.types import Prompt, Sample

SHOWN = 80
"""Characters of an answer that a reason shows."""

# A minus after a digit, a letter or a parenthesis is an operation: the last number of `5-3` is 3.
_NUMBER = re.compile(
    r"(?<![\w.)])[-\u2212]?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:/[0-9]+)?%?"
    r"|[0-9]+(?:\.[0-9]+)?%?"
)
_STATED = re.compile(
    r"\b(?i:answer)(?:(?i:\s++(?:is|should\s++be))\s*+[:=]?+|[*_]*+\s*+[:=])\s*+[*$]*+"
    r"(?:\\(?:boxed|text|textbf|mathrm)\{)*+\(?+([A-Z])\b"
    r"(?!(?<=[AI]) +[a-z])(?!\W{0,4}(?:or|and|/)\W{0,3}[A-Z]\b(?! [a-z])|, ?\(?[A-Z]\)?(?:[.,]|\s*$))"
)
"""Pattern of an option stated as the answer. After "the answer is", a or i before a word is not an option.

All quantifiers are possessive, so that the time is linear in the length of white space."""
_OPTION = re.compile(r"\(?([A-Za-z])(?:[).:]+|$)\s*(.*)", re.DOTALL)
_UPRIGHT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")


def accuracy(sample: Sample, options: StrictOptions | NoOptions) -> Verdict:
    """1.0 when the completion has R1-Zero's format and its last answer tag holds the ground truth."""
    if not think_answer_format(sample, _strict(options)):
        return Verdict(0.0, "the completion is not <think>...</think> <answer>...</answer>")
    return _compared(answer_tag(sample.text), sample.prompt.answer)


def boxed_accuracy(sample: Sample, options: StrictOptions | NoOptions) -> Verdict:
    r"""1.0 when the last `\boxed{...}` holds the ground truth; no other format is required.

    Several boxes in the last sentence are one answer: the coordinates or the solutions that the truth lists, in that
    order or with their names, or one value in several spellings. A list of guesses therefore equals none of them.
    """
    truth, last = sample.prompt.answer, boxes(sample.text, _strict(options))
    if len(last) < 2:
        return _compared(last[0].content if last else None, truth)
    # Several boxes are tried as one answer: as a list, as a point, and with names where every box has one. Under one
    # name they are several solutions, and the names may be left out; different names say which value is which.
    contents, lefts = [box.content for box in last], [box.left for box in last]
    joined = ", ".join(contents)
    ways = [joined, f"({joined})"]
    if all(lefts):
        named = ", ".join(f"{left} = {content}" for left, content in zip(lefts, contents, strict=True))
        ways = [named, joined] if len({*lefts}) == 1 else [named]
    right = any(equivalent(way, truth) for way in ways) or all(equivalent(c, truth) for c in unlike(last))
    return Verdict(1.0) if right else Verdict(0.0, _unequal(ways[0], truth))


def stated_accuracy(sample: Sample, options: StrictOptions | NoOptions) -> Verdict:
    """1.0 when the answer stated last ("Answer: 42", "The answer is 42.") equals the ground truth."""
    return _compared(final_answer(sample, "stated", _strict(options)), sample.prompt.answer)


def last_number(sample: Sample, _: NoOptions) -> Verdict:
    """1.0 when the last number of a completion that stopped by itself equals the ground truth."""
    return _compared(number_in(sample), sample.prompt.answer)


def number_in(sample: Sample) -> str | None:
    """Last number after the thoughts of a completion that stopped by itself; None when there is none."""
    numbers = _NUMBER.findall(final_answer(sample, "text") or "")
    return numbers[-1].replace("\u2212", "-") if numbers else None


def _strict(options: StrictOptions | NoOptions) -> bool:
    return isinstance(options, StrictOptions) and options.strict


def _compared(answer: str | None, truth: str) -> Verdict:
    """1.0 for an answer equal to the truth; otherwise 0.0, with the answer as the reason."""
    if answer is None:
        return Verdict(0.0, "no answer")
    return Verdict(1.0) if equivalent(answer, truth) else Verdict(0.0, _unequal(answer, truth))


def _unequal(answer: str, truth: str) -> str:
    return f"{answer.strip()[:SHOWN]!r} is not {truth[:SHOWN]!r}"


def exact(sample: Sample, options: ExactOptions) -> Verdict:
    """1.0 when the answer equals the ground truth as text; runs of white space count as one space and are trimmed."""
    answer, truth = (
        " ".join((text or "").split())
        for text in (final_answer(sample, options.read, options.strict), sample.prompt.answer)
    )
    equal = answer.casefold() == truth.casefold() if options.ignore_case else answer == truth
    # A problem without an answer must not reward a completion without one.
    return Verdict(1.0) if equal and truth else Verdict(0.0, _unequal(answer, truth))


def multiple_choice(sample: Sample, options: ChoiceOptions) -> Verdict:
    """1.0 when the answer names the option that the ground truth names, by letter or text.

    The problem's metadata has the texts of the options in a list, `choices`, whose first entry is A.

    Raises InputError when the ground truth names no option.
    """
    right, chosen = right_option(sample.prompt), chosen_option(sample, options)
    return Verdict(1.0) if chosen == right else Verdict(0.0, f"chooses {chosen or 'no option'}, not {right}")


def chosen_option(sample: Sample, options: ChoiceOptions) -> str | None:
    """Capital letter of the option that a completion chooses; None when it chooses none or several.

    When the whole completion is read, the answer is the option that it states last ("the answer is (B)"), or the text
    itself if it is only an option.
    """
    choices = sample.prompt.metadata.get("choices", ())
    answer = final_answer(sample, options.read, options.strict) or ""
    if chosen := option(answer, choices):
        return chosen
    stated = [letter for letter in _STATED.findall(answer) if not choices or _index(letter) < len(choices)]
    if options.read != "text" or not stated or (options.strict and len(set(stated)) > 1):
        return None
    return stated[-1]


def right_option(prompt: Prompt) -> str:
    """Capital letter of the correct option of a problem. Raises InputError when its answer names no option."""
    choices = prompt.metadata.get("choices", ())
    if not isinstance(choices, (list, tuple)) or not all(isinstance(choice, str) for choice in choices):
        raise InputError(f"choices={choices!r} in the metadata", "not a list of texts", "write a list of texts")
    truth = option(prompt.answer, choices)
    if truth is None:
        what = f"names none of the options {[*choices] or 'A to Z'}"
        raise InputError(f"the answer {prompt.answer!r}", what, "write the letter or the text of an option")
    return truth


def option(text: str, choices: Sequence[str]) -> str | None:
    """Capital letter of the option that a text names, by letter or by wording; None when it is not an option.

    A letter followed by a text, `(B) Paris`, counts if the text is that of the option, where the texts are known.
    """
    text = _plain(text)
    texts = [_plain(choice).casefold() for choice in choices]
    # Two options with the same text can only be told apart by their letters.
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
    # Each pass opens one level of nested fonts. A completion may nest thousands, which would take quadratic time.
    for _ in range(3):
        text = _UPRIGHT.sub(r"\1", text)
    text = " ".join(text.replace("$", " ").replace("*", " ").split())
    return text.removesuffix(".")
