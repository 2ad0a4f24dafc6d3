"""Where steps end: by the separators, the same in training and in reinforcement learning."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.data.tokenizer import CharTokenizer
from grpo_mega.step_ends import beginnings, step_ends, step_tokens

CHARS = CharTokenizer()
SUM = [";", "</think>"]


@pytest.mark.parametrize(
    ("text", "separators", "steps"),
    [
        ("<think>3+5=8;8+2=10</think><answer>10</answer>", SUM, ["<think>3+5=8", "8+2=10", "<answer>10</answer>"]),
        ("one\n\ntwo\n\n", ["\n\n"], ["one", "two"]),
        ("one\n\ntwo\nthree", ["\n", "\n\n"], ["one", "two", "three"]),
        (";; ;a", [";"], ["a"]),
        ("no end", [";"], ["no end"]),
        (";", [";"], []),
        ("a.b", ["."], ["a", "b"]),
    ],
)
def test_separators_divide_steps_and_blanks_are_none(text: str, separators: list[str], steps: list[str]) -> None:
    ends = step_ends(text, separators)
    assert len(ends) == max(1, len(steps))
    assert ends[-1] == len(text)
    for end, step in zip(ends[:-1], steps[:-1], strict=True):
        assert text[:end].endswith(step)
    for begun, end, further in zip(beginnings(text, separators), ends[:-1], steps[1:], strict=True):
        assert text.startswith(begun + further)
        assert begun.startswith(text[:end])


@given(st.lists(st.sampled_from(["1", "+", "=", ";", "</think>", "<answer>", "23"]), max_size=20))
def test_the_tokens_of_steps_are_where_their_texts_end(parts: list[str]) -> None:
    text = "".join(parts)
    ids = [*CHARS.encode(text), CHARS.eos_id]
    tokens, ends = step_tokens(text, ids, CHARS.decode, SUM), step_ends(text, SUM)
    assert tokens[-1] == len(ids) - 1, "the last step has the token that ends the completion"
    assert [CHARS.decode(ids[: token + 1]) for token in tokens[:-1]] == [text[:end] for end in ends[:-1]]
