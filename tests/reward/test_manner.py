"""Terms about how a completion is written: language, length, repetitions."""

from __future__ import annotations

import re
import unicodedata
from array import array
from fractions import Fraction
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.config.schema import RewardConfig, RewardTerm
from grpo_mega.config.schema.terms import (
    SCRIPTS,
    LanguageOptions,
    LengthOptions,
    OverlongOptions,
    RepetitionOptions,
)
from grpo_mega.reward.compose import build_reward
from grpo_mega.reward.manner import RANGES, language, length, overlong, repetition
from grpo_mega.reward.verdict import sample_json
from grpo_mega.types import Prompt, Sample, Spans

GREETINGS = {
    "latin": "Größe, naïve, Łódź",
    "cyrillic": "Привет, мир",
    "greek": "Καλημέρα, ἀρχή",
    "arabic": "مرحبا بالعالم",
    "hebrew": "שלום עולם",
    "devanagari": "नमस्ते दुनिया",
    "bengali": "নমস্কার",
    "tamil": "வணக்கம்",
    "thai": "สวัสดีชาวโลก",
    "georgian": "გამარჯობა",
    "armenian": "Բարեւ աշխարհ",
    "chinese": "你好世界𠀀",
    "japanese": "こんにちは、カタカナと漢字。",
    "korean": "안녕하세요",
}
HAN = {"chinese", "japanese"}


def sample(text: str = "", tokens: list[int] | None = None, given: Spans = ()) -> Sample:
    prompt = Prompt("p/1", (1,), "?", "8", "t")
    return Sample(prompt, 0, array("i", tokens or []), array("f"), "stop", ((0, 0),), text, None, given)


def share(text: str, script: str) -> float:
    return language(sample(text), LanguageOptions(script))


def test_every_script_has_letters():
    assert set(GREETINGS) == set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_text_belongs_to_its_script_and_to_no_other(script: str):
    for other in SCRIPTS:
        if other == script:
            assert share(GREETINGS[script], other) == 1.0
        elif not {script, other} <= HAN:
            assert share(GREETINGS[script], other) == 0.0


def test_mixed_texts_count_by_letters():
    assert share("你好 ab", "chinese") == share("你好 ab", "latin") == 0.5
    assert share("漢字かな", "chinese") == 0.5
    assert share("мир abc", "cyrillic") == 0.5


def test_digits_signs_tags_and_latex_commands_count_in_no_language():
    assert share(r"<think>答案是 $\frac{1}{2} + 3$。</think><answer>12</answer>", "chinese") == 1.0
    assert share(r"\sqrt{2} = 1.41", "latin") == share("\u00b2\u00bd\u2082\u2160\u2460", "latin") == 0.0
    assert share("", "latin") == 0.0


WORDS = {"chinese": {"CJK", "BOPOMOFO"}, "japanese": {"CJK", "HIRAGANA", "KATAKANA"}, "korean": {"HANGUL"}}
"""What the names of a script's characters begin with, where it is not the script's own name."""
SHARED = "\u00aa\u00ba\u3005" + "".join(map(chr, range(0x3E2, 0x3F0)))
"""Of Latin, Han and Greek (there, Coptic), although they are named otherwise."""


@cache
def names() -> dict[str, set[str]]:
    """What the names begin with of all letters in the basic plane, but phonetic and raised ones, and modifiers."""
    plain = [
        chr(i) for i in range(0x10000) if not (0x1D00 <= i < 0x1DC0 or 0x2070 <= i < 0x20A0 or i in (0x2184, 0xAB65))
    ]
    letters = [c for c in plain if c.isalpha() and unicodedata.category(c) != "Lm" and c not in SHARED]
    return {c: {*unicodedata.name(c, "").replace("-", " ").split()[:2]} for c in letters}


@pytest.mark.parametrize("script", SCRIPTS)
def test_ranges_agree_with_the_names_of_the_characters(script: str):
    """All letters that are named so at once, and all others: where one counts wrong, the share is another."""
    words = WORDS.get(script, {script.upper()})
    named = [c for c, name in names().items() if words & name]
    others = [c for c, name in names().items() if not words & name]
    assert share("".join(named), script) == 1.0, [c for c in named if not share(c, script)]
    assert share("".join(others), script) == 0.0, [c for c in others if share(c, script)]


@given(
    st.lists(st.text(st.characters(codec=None)) | st.sampled_from([*GREETINGS.values(), r"\frac", "<a>"])),
    st.sampled_from(SCRIPTS),
)
def test_shares_are_of_letters(parts: list[str], script: str):
    """Letter by letter: what the table counts at once. Surrogates, alone or in pairs, are no letters."""
    text = "".join(parts)
    letters = [c for c in re.sub(r"\\[A-Za-z]+|</?[A-Za-z_]+>", "", text) if c.isalpha()]
    belong = [c for c in letters if re.match(f"[{RANGES[script]}]", c)]
    assert share(text, script) == (len(belong) / len(letters) if letters else 0.0)


def test_length_rises_from_low_to_high():
    options = LengthOptions(low=2, high=6)
    assert [length(sample(tokens=[0] * n), options) for n in (0, 2, 3, 4, 6, 9)] == [0.0, 0.0, 0.25, 0.5, 1.0, 1.0]


def test_replies_of_an_environment_have_no_length():
    answered = sample(tokens=[0] * 9, given=((1, 3), (5, 8)))
    assert length(answered, LengthOptions(low=2, high=6)) == 0.5
    assert overlong(answered, OverlongOptions(limit=4, buffer=2)) == -1.0
    assert overlong(answered, OverlongOptions(limit=8, buffer=4)) == 0.0
    assert sample_json(answered)["tokens"] == 4


@given(st.integers(0, 60), st.integers(1, 50), st.integers(1, 50))
def test_overlong_is_equation_13_of_dapo(tokens: int, limit: int, buffer: int):
    buffer = min(buffer, limit)
    if tokens <= limit - buffer:
        expected = Fraction(0)
    elif tokens <= limit:
        expected = Fraction(limit - buffer - tokens, buffer)
    else:
        expected = Fraction(-1)
    assert overlong(sample(tokens=[0] * tokens), OverlongOptions(limit, buffer)) == float(expected)


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 5))
def test_repetition_is_the_share_of_stretches_that_came_before(tokens: list[int], size: int):
    stretches = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    again = sum(stretch in stretches[:i] for i, stretch in enumerate(stretches))
    assert repetition(sample(tokens=tokens), RepetitionOptions(size)) == (-again / len(stretches) if stretches else 0.0)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=20, unique=True))
def test_different_tokens_repeat_nothing(tokens: list[int]):
    assert repetition(sample(tokens=tokens), RepetitionOptions(1)) == 0.0


def test_they_are_terms_of_a_reward():
    terms = [
        RewardTerm("consistent", 0.5, kind="language", options={"script": "latin"}),
        RewardTerm("long", -1.0, kind="length", options={"low": 0, "high": 4}),
        RewardTerm("too_long", kind="overlong", options={"limit": 4, "buffer": 4}),
        RewardTerm("again", kind="repetition", options={"size": 1}),
    ]
    (score,) = build_reward(RewardConfig(terms, "consistent")).score([sample("你a", [1, 1])])
    assert score.terms == {"consistent": 0.5, "long": 0.5, "too_long": -0.5, "again": -0.5}
    assert score.total == 0.25 - 0.5 - 0.5 - 0.5


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("language", {}, r"options.script: required by language"),
        ("language", {"script": "english"}, r"options.script=english: unknown; choose one of latin, cyrillic"),
        ("length", {"low": 5, "high": 5}, r"options.low=5: no range up to high=5; choose 0 <= low < high"),
        ("length", {"low": True, "high": 5}, r"options.low=True: of the wrong type; write a whole number"),
        ("overlong", {"limit": 5, "buffer": 6}, r"options.buffer=6: not within limit=5; choose 0 < buffer <= limit"),
        ("repetition", {"size": 0}, r"options.size=0: out of range; choose a value in \[1, 10000\]"),
        ("repetition", {"n": 3}, r"options.n: not an option of repetition; choose from size"),
        ("last_number", {"strict": True}, r"options.strict: not an option of last_number; leave it out"),
        ("format", {"template": "think"}, r"options.template=think: unknown; choose one of think_answer, boxed"),
        ("exact", {"read": "box"}, r"options.read=box: unknown; choose one of text, tag, boxed"),
        ("regex", {"pattern": "("}, r"options.pattern='\(': not a regular expression"),
    ],
)
def test_options_that_make_no_sense_are_refused(kind: str, options: dict[str, object], message: str):
    with pytest.raises(ValueError, match=r"reward.terms\[0\]." + message):
        build_reward(RewardConfig([RewardTerm(kind=kind, options=options)], kind))
