"""One final answer or none: tags and boxes, and the tricks that must not pass."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mega.reward.extract import answer_tag, boxed


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>3+5=8</think><answer>8</answer>", "8"),
        ("<answer> 8\n</answer>", " 8\n"),
        ("<answer></answer>", ""),
        ("8", None),
        ("<answer>8", None),
        ("8</answer>", None),
        ("</answer>8<answer>", None),
        ("<answer>8</answer><answer>8</answer>", None),
        ("<think><answer>8</answer></think><answer>9</answer>", None),
        ("<answer><answer>8</answer></answer>", None),
        ("<answer>8<answer>9</answer>", None),
        ("<answer>8</answer></answer>", None),
        ("<ANSWER>8</ANSWER>", None),
        ("< answer>8</answer>", None),
    ],
)
def test_answer_tag(text: str, answer: str | None):
    assert answer_tag(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{8}.", "8"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\}}", r"\}"),
        (r"\boxed{}", ""),
        (r"\boxed{8} and again \boxed{8}", "8"),
        (r"\boxed{8} or \boxed{9}", None),
        (r"\boxed{\boxed{8}}", None),
        (r"\boxed{8", None),
        (r"\boxed{8} \boxed{9", None),
        (r"\boxed{{8}", None),
        (r"\boxed8}", None),
        (r"\boxed 8", None),
        (r"\boxed", None),
        ("8", None),
    ],
)
def test_boxed(text: str, answer: str | None):
    assert boxed(text) == answer


@pytest.mark.parametrize("piece", [r"\boxed{", r"\boxed{}", "{", "}", "\\"])
def test_boxed_is_linear_in_hostile_text(piece: str):
    text = piece * 300_000
    assert boxed(text) in (None, "")
    assert boxed(text + "}" * 300_000) in (None, "")


@settings(max_examples=100)
@given(st.text(alphabet=st.characters(exclude_characters="{}\\<>")), st.text(alphabet="ab \n"))
def test_what_is_wrapped_comes_back(content: str, around: str):
    assert boxed(f"{around}\\boxed{{{content}}}{around}") == content
    assert answer_tag(f"{around}<answer>{content}</answer>{around}") == content


@settings(max_examples=200)
@given(st.lists(st.sampled_from(["\\boxed", "{", "}", "8", "\\", "<answer>", "</answer>"])))
def test_no_text_raises_and_no_answer_holds_a_tag(pieces: list[str]):
    text = "".join(pieces)
    tagged, box = answer_tag(text), boxed(text)
    assert tagged is None or "answer>" not in tagged
    assert box is None or f"\\boxed{{{box}}}" in text
