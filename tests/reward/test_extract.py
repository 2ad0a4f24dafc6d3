"""The final answer of a completion: tags, boxes, what is stated, and the tricks that must not pass."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_mega.reward.extract import answer_tag, boxed, stated


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
        ("<answer>8</answer><answer>9</answer>", "9"),
        ("<think><answer>8</answer></think><answer>9</answer>", "9"),
        ("<think>It goes in <answer> </answer>.</think><answer>9</answer>", "9"),
        ("<think><answer>8</answer></think>", None),
        ("<answer>8</answer><answer>9", None),
        ("<answer><answer>8</answer></answer>", "8"),
        ("<answer>8<answer>9</answer>", "9"),
        ("<answer>8</answer></answer>", "8"),
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
        (r"\boxed{8} or \boxed{9}", "8, 9"),
        (r"\boxed{8}, \boxed{8} or even \boxed{9}", "8, 9"),
        (r"\boxed{1}, \boxed{2}, \boxed{1}", "1, 2"),
        (r"It may be \boxed{8}. No, it is \boxed{9}.", "9"),
        ("So\n\\[\\boxed{8}\\]\n\n**Final Answer** $\\boxed{9}$", "9"),
        ("\\[\\boxed{8}\\]\n\n\\[\\boxed{9}\\]", "8, 9"),
        ("- $x_1 = \\boxed{8}$\n- $x_2 = \\boxed{9}$", "8, 9"),
        (r"<think>Put it in \boxed{}. Maybe \boxed{8}?</think> \boxed{9}", "9"),
        (r"[THINK]\boxed{8}[/THINK] \boxed{9}", "9"),
        (r"<think>\boxed{8}</think> It is 8.", None),
        (r"\boxed{9}, in \boxed{} as you asked", "9"),
        (r"\boxed{\boxed{8}}", "8"),
        (r"\boxed{8}. In LaTeX \boxed draws a box", "8"),
        (r"\fbox{8}", "8"),
        (r"\\boxed{8}", "8"),
        (r"\boxed {8}", "8"),
        ("\\boxed\n{8}", "8"),
        (r"\boxed{8", None),
        (r"\boxed{8} \boxed{9", None),
        (r"\boxed{{8}", None),
        (r"\boxed 8", "8"),
        (r"\boxed 3.75$", "3.75"),
        (r"\boxed x", "x"),
        (r"\boxed and", None),
        ("".join(rf"\boxed{{{i}}}, " for i in range(8)), "0, 1, 2, 3, 4, 5, 6, 7"),
        ("".join(rf"\boxed{{{i}}}, " for i in range(9)), None),
        (r"\boxed", None),
        ("8", None),
    ],
)
def test_boxed(text: str, answer: str | None):
    assert boxed(text) == answer


@pytest.mark.parametrize("piece", [r"\boxed{", r"\boxed{}", "{", "}", "\\"])
def test_boxed_is_linear_in_hostile_text(piece: str):
    for text in (piece * 300_000, piece * 300_000 + "}" * 300_000):
        assert set(boxed(text) or "") <= set("{}\\")
        assert boxed(text, strict=True) in (None, "")


@settings(max_examples=100)
@given(st.text(alphabet=st.characters(exclude_characters="{}\\<>")), st.text(alphabet="ab \n"))
def test_what_is_wrapped_comes_back(content: str, around: str):
    assert boxed(f"{around}\\boxed{{{content}}}{around}") == content
    assert answer_tag(f"{around}<answer>{content}</answer>{around}") == content


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: 42", "42"),
        ("so\nAnswer: 41\nNo.\nAnswer: 42", "42"),
        ("**Answer:** $42$.", "42"),
        ("The final answer is $\\frac{1}{2}$. I hope it is correct.", "\\frac{1}{2}"),
        ("**Final Answer**\n\n\\[\n42\n\\]", "42"),
        ("Final Answer: The final answer is 3.5.", "3.5"),
        ("Hence the answer to the question is B", "B"),
        ("The answer is 12, because it must be even.", "12"),
        ("Answer: \\boxed{42}", "42"),
        ("Answer:\n42\nGood luck!", "42"),
        ("\u7b54\u6848\u662f 42\u3002", "42"),
        ("<think>The answer is 41.</think>The answer is 42.", "42"),
        ("<think>The answer is 41.</think>42", None),
        ("The answer is hard to find", "hard to find"),
        ("The answer is 42. I hope that this answer is helpful.", "42"),
        ("### Final Answer\n\n42", "42"),
        ("Final answer = 42", "42"),
        ("The answer is $5!$.", "5!"),
        ("The answer cannot be 42.", None),
        ("The answer can't be 42", None),
        ("\u6240\u4ee5\u6b63\u786e\u7b54\u6848\u4e0d\u662f42", None),
        ("Is answer B right? No.", None),
        ("We answer 42", None),
        ("Answer:", None),
        ("42", None),
    ],
)
def test_stated(text: str, answer: str | None):
    assert stated(text) == answer


@pytest.mark.parametrize(
    ("text", "of_tag", "of_box", "said"),
    [
        (r"<answer>8</answer> \boxed{8} Answer: 8", "8", "8", "8"),
        (r"<think><answer></think><answer>8</answer>", None, None, None),
        (r"<think>\boxed{7}</think> \boxed{8}", None, None, None),
        (r"\boxed{} \boxed{8}", None, None, None),
        (r"\boxed 8", None, None, None),
        (r"\boxed{8} is \boxed{8}", None, "8", None),
        ("<think>The answer is 8.</think>Answer: 8", None, None, None),
    ],
)
def test_strict_reading_refuses_a_second_answer(text: str, of_tag: str | None, of_box: str | None, said: str | None):
    assert (answer_tag(text, True), boxed(text, True), stated(text, True)) == (of_tag, of_box, said)


@settings(max_examples=200)
@given(st.lists(st.sampled_from(["\\boxed", "{", "}", "8", "\\", "<answer>", "</answer>", "Answer: ", "\n"])))
@example(["\\boxed", "{", "\\boxed", "Answer: ", "}"])  # the name of this command is \boxedAnswer
@example(["\\boxed", "\n", "{", "}"])
def test_no_text_raises_and_no_answer_holds_a_tag(pieces: list[str]):
    text = "".join(pieces)
    tagged, box = answer_tag(text), boxed(text)
    assert tagged is None or "answer>" not in tagged
    assert box is None or not re.search(r"\\boxed(?![A-Za-z])", box)
    if (strictly := boxed(text, strict=True)) is not None:
        assert strictly == box
        assert re.search(r"\\boxed\s*" + re.escape(f"{{{box}}}"), text)
    for reader in (answer_tag, stated):
        assert reader(text, strict=True) in (None, reader(text))


@pytest.mark.parametrize(
    "piece", ["answer is ", "the answer ", "the a answer", "answer:\n", "$", "**Answer** ", "\u7b54\u6848"]
)
def test_stated_is_linear_in_hostile_text(piece: str):
    stated(piece * 100_000)
