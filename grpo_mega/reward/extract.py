r"""Reads the final answer of a completion: `<answer>...</answer>`, `\boxed{...}`, "Answer: ...", or all of the text.

The last answer counts, after the end of thinking if the completion has one: boxes and tags in the thoughts, quoted from
the instruction or abandoned on the way, cost nothing, and listing guesses earns nothing. Strict reading, an
option of every term that reads an answer, refuses a completion with any other answer in it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_mega.types import Sample

END_OF_THINKING = re.compile(
    r"</(?:think|thinking|thought|reasoning|seed:think)>|\[/THINK\]|\u25c1/think\u25b7|<\|channel\|>final<\|message\|>"
)
"""Marks that end the thoughts: DeepSeek-R1 and Qwen3, Seed-OSS, Magistral, Kimi, GPT-OSS, and their spellings."""
PREFILLED = re.compile(r"<think>\s*\Z")
"""End of a prompt whose chat template begins the completion with thoughts."""
MOST_BOXES = 8
"""Largest number of boxes read as one answer."""

_TAG = re.compile(r"</?answer>")
# A backslash consumes the next character, so the literal braces `\{` and `\}` never open or close a group.
_TOKEN = re.compile(r"(?P<box>\\\\?(?:boxed|fbox)(?![A-Za-z]))|\\.|[{}]", re.DOTALL)
_BOX = re.compile(r"\\\\?(?:boxed|fbox)(?![A-Za-z])\s*")
_INNER = re.compile(_BOX.pattern + r"\{([^{}]*)\}")
_BARE = re.compile(r"\s*(-?[0-9]+(?:[.,/][0-9]+)*|[A-Za-z](?![A-Za-z]))")
"""Argument without braces: `\\boxed 7`."""
_LEFT = re.compile(r"(?:^|[^\w\\{])(\\?[A-Za-z]+(?:_\{?\w+\}?)?)\s*=\s*$")
"""Left side directly before a box: `x = \\boxed{3}`."""
# Up to 60 characters without the end of a sentence; the point of a decimal ends none.
_SAME_SENTENCE = re.compile(r"(?:[^.!?\n\u3002\uff01\uff1f]|\.(?=[0-9])){0,60}")
# Between the boxes of a list: white space, punctuation, bullets, `and` or `or`, and the left side of the next box.
_ONLY_JOINS = re.compile(
    r"(?:[\s$&,;.|]|\\[\[\]()\\,; ]|\*\*|\\q?quad|(?:^|(?<=\n))[ \t]*(?:[-*\u2022]|[0-9]{1,2}[.)])|\b(?:and|or)\b"
    r"|\\text\{ ?(?:and|or) ?\}|[\u6216\u548c\u4e0e\uff0c\uff1b\u3001])*(?:\\?[A-Za-z]+(?:_\{?\w+\}?)?\s*=\s*)?"
)
# "Answer: ...", "the answer is ..." (also with up to 60 characters in between, and in Chinese), or a heading "Answer".
_STATED = re.compile(
    r"(?i:\banswer)[*_ ]{0,9}[:\uff1a=]"
    r"|(?:(?i:\b(?:the|our|my|final|correct)\s{1,9}(?:\w{1,20}\s{1,9})?answer|^[^\w\n]{0,9}answer)\b|\u7b54\u6848)"
    r"(?:(?!not\b|n['\u2019]t\b|\u4e0d)[^\n.:\uff1a]){0,60}?(?:\b(?:is|are|be|equals)\b|[\u662f\u4e3a\uff1a:])\s{0,9}[:\uff1a]?"
    r"|(?i:^[^\w\n]{0,9}(?:final )?answer)[*_ ]{0,9}(?=\s*\n)",
    re.MULTILINE,
)
"""Pattern of words that announce an answer; "this answer is helpful" and "the answer cannot be 42" do not match."""
# The full stop after `Rs`, `No` or an initial, and the point of a decimal, end no sentence; nor does the sign of 5!.
_SENTENCE_END = re.compile(
    r",?\s(?:because|since)\b|(?<!\bRs)(?<!\bNo)(?<!\b[A-Z])\.(?=\s|\*|$)|\u3002|(?<=[a-z]{2})!(?=\s|$)"
)
_PROPERTY = re.compile(
    r"(?:indeed |also |always |not )?(?:an? )?(?:(?:positive|negative|whole|natural|real|rational|prime|even|odd) )?"
    r"(?:integer|number|positive|negative|even|odd|prime|rational|real|correct|unique|reasonable|consistent)\b[a-z ]*"
)
"""What a statement says of an answer that another one gives: "the answer is an integer"."""
_DISPLAY = (("$$", "$$"), (r"\[", r"\]"), ("$", "$"), (r"\(", r"\)"))


@dataclass(frozen=True)
class BoxedAnswer:
    r"""One box of a completion.

    Attributes:
        content: Content of the box, with inner boxes opened.
        left: Left side before the box, `x` in `x = \boxed{3}`; "" without one.
    """

    content: str
    left: str = ""


def final_answer(sample: Sample, read: str, strict: bool = False) -> str | None:
    r"""Final answer of a completion, read from the place `read`; None when it has none.

    Args:
        sample: Sample with the completion's text.
        read: "tag" for its last answer tag, "boxed" for its last box, "stated" for what follows its last "Answer:" or
            "the answer is", "text" for all that comes after its thoughts. For "text" and "stated" the completion must
            have stopped by itself: one cut by the length limit has not reached its answer.
        strict: Whether any other answer of this kind, wherever it is, leaves the completion without one.
    """
    if read == "tag":
        return answer_tag(sample.text, strict)
    if read == "boxed":
        return boxed(sample.text, strict)
    if sample.finish_reason != "stop":
        return None
    return stated(sample.text, strict) if read == "stated" else conclusion(sample.text)


def conclusion(text: str) -> str:
    """Text after the last mark that ends the thoughts; the whole text if it has none."""
    end = 0
    for mark in END_OF_THINKING.finditer(text):
        end = mark.end()
    return text[end:]


def answer_tag(text: str, strict: bool = False) -> str | None:
    """Content of the last `<answer>...</answer>` after the thoughts; None when there is none, or the last is unclosed.

    With `strict` the text must have no other answer tag.
    """
    if strict and len(_TAG.findall(text)) != 2:
        return None
    text = conclusion(text)
    # An opening tag discards what an earlier pair held, so a last tag that is never closed leaves no answer.
    content, opened = None, -1
    for tag in _TAG.finditer(text):
        if tag.group() == "<answer>":
            content, opened = None, tag.end()
        elif opened >= 0:
            content, opened = text[opened : tag.start()], -1
    return content


def boxed(text: str, strict: bool = False) -> str | None:
    """Content of the last box, or different ones of the last boxes joined by commas, see `boxes`; None without any."""
    contents = unlike(boxes(text, strict))
    return ", ".join(contents) if contents else None


def unlike(several: Sequence[BoxedAnswer]) -> list[str]:
    """Contents of the boxes, without those that repeat an earlier one."""
    contents: dict[str, str] = {}
    for box in several:
        contents.setdefault("".join(box.content.split()), box.content)
    return list(contents.values())


def boxes(text: str, strict: bool = False) -> list[BoxedAnswer]:
    r"""Boxes that state the answer: the last one, and those in its sentence, `x = \boxed{2}` or `x = \boxed{-3}`.

    Empty boxes count only where there is no other. [] when there is none, when the last one is never closed, or when
    more than `MOST_BOXES` belong together. With `strict`, [] also when the text has a box with other content, or one
    without braces.
    """
    # Strict reading looks at the whole text, thoughts included: every mention of a box must be one with the same
    # content.
    if strict:
        found = _all_boxes(text)
        alike = {text[start:end].strip() for start, end in found}
        whole = sum(end > 0 and text[start] == "{" for start, end in found) == len(_BOX.findall(text))
        return [_box(text, *found[0])] if len(alike) == 1 and whole else []
    text = conclusion(text)
    found = _all_boxes(text)
    found = [box for box in found if box[1] < 0 or text[slice(*box)].strip("{} \n")] or found[-1:]
    # Backwards from the last box, as long as only a part of a sentence, or what joins a list, separates it from the one
    # before.
    last: list[BoxedAnswer] = []
    for index in reversed(range(len(found))):
        start, end = found[index]
        if end < 0 or len(last) > MOST_BOXES:
            return []
        last.append(_box(text, start, end))
        gap = text[found[index - 1][1] : text.rfind("\\", 0, start)] if index else ""
        if not (gap and (_SAME_SENTENCE.fullmatch(gap) or (len(gap) < 200 and _ONLY_JOINS.fullmatch(gap)))):
            break
    return last[::-1] if len(last) <= MOST_BOXES else []


def _all_boxes(text: str) -> list[tuple[int, int]]:
    r"""(start, end) of each outermost argument of a box, braces included, in order; end is -1 for an unclosed last one.

    A `\boxed` without an argument is only mentioned, and left out.
    """
    found: list[tuple[int, int]] = []
    # For each open brace its position, and whether it begins the argument of an outermost box.
    open_groups: list[tuple[int, bool]] = []
    inside = 0
    expected = -1
    for token in _TOKEN.finditer(text):
        sign = token.group()
        if token["box"]:
            opening = _BOX.match(text, token.start())
            assert opening is not None
            expected = opening.end()
            if not text.startswith("{", expected):
                bare = _BARE.match(text, token.end())
                if bare and not inside:
                    found.append((bare.start(1), bare.end()))
        elif sign == "{":
            outermost = token.start() == expected and not inside
            inside += outermost
            open_groups.append((token.start(), outermost))
        elif sign == "}" and open_groups:
            # `inside` counts open arguments of outermost boxes, so boxes within a box do not count as further ones.
            start, outermost = open_groups.pop()
            inside -= outermost
            if outermost:
                found.append((start, token.end()))
    return [*found, (open_groups[0][0], -1)] if inside else found


def _box(text: str, start: int, end: int) -> BoxedAnswer:
    """The box whose argument is `text[start:end]`."""
    content = text[start + 1 : end - 1] if text[start] == "{" else text[start:end]
    # Each pass opens one level of boxes within boxes. A completion may nest thousands, so the number is bounded.
    for _ in range(3):
        content = _INNER.sub(r"\1", content)
    content = _BOX.sub("", content)
    left = _LEFT.search(text, max(0, start - 40), text.rfind("\\", 0, start))
    return BoxedAnswer(content, left[1] if left else "")


def stated(text: str, strict: bool = False) -> str | None:
    """What follows the last "Answer:" or "the answer is" after the thoughts, to the end of the sentence or formula.

    As DAPO's prompt asks for it (arXiv 2503.14476). A box in it is opened. A statement about the answer, "the answer is
    positive", counts only where there is no other. None when nothing is stated; with `strict`, also when something is
    stated twice.
    """
    found = list(_STATED.finditer(text if strict else conclusion(text)))
    if not found or (strict and len(found) > 1):
        return None
    answers = [_statement(match.string[match.end() :]) for match in found]
    return next((answer for answer in reversed(answers) if answer and not _PROPERTY.fullmatch(answer)), answers[-1])


def _statement(text: str) -> str | None:
    """The answer with which a text begins: its first sentence or formula, or the box in it."""
    # A formula that begins the text is the answer if its sentence ends with it: in "$x$ is 3", x is not the answer.
    answer = text.strip(" \t\n*_")
    for opening, closing in _DISPLAY:
        if answer.startswith(opening) and (end := answer.find(closing, len(opening))) >= 0:
            rest = answer[end + len(closing) :].partition("\n")[0]
            if not rest.strip(" .*_") or _SENTENCE_END.match(rest.lstrip(" *_")):
                answer = answer[len(opening) : end].strip()
                break
    else:
        answer = _SENTENCE_END.split(answer.partition("\n")[0], maxsplit=1)[0].strip(" \t*_")
    return (boxed(answer) if _BOX.search(answer) else answer) or None
