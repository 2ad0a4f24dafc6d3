"""The think-answer format: nothing before, between or behind the two pairs of tags."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from grpo_mega.config.schema.terms import StrictOptions
from grpo_mega.reward.answers import accuracy
from grpo_mega.reward.manner import think_answer_format
from grpo_mega.types import Prompt, Sample

GOOD = "<think>3+5=8</think><answer>8</answer>"


def sample(text: str, finish_reason: str = "stop") -> Sample:
    prompt = Prompt(id="p", token_ids=(1,), text="<bos>3+5=?", answer="8", task="chain_sum")
    return Sample(prompt, 0, array("i", [2]), array("f", [0.0]), finish_reason, ((0, 0),), text)


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        "<think>\na\n</think><answer>b\n</answer>",
        " <think> 3+5=8 </think>\n<answer> 8 </answer>",
        "<think>If x < 3 and y > 2, or a <b> c</think><answer>x<3</answer>",
        "<think>It goes into <answer> </answer>. 3+5=8</think><answer>8</answer>",
    ],
)
def test_accepted(text: str):
    assert think_answer_format(sample(text)) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8",
        "<answer>8</answer>",
        "<think>3+5=8</think>8",
        "<think></think><answer>8</answer>",
        "<think> </think><answer>8</answer>",
        "<think>3+5=8</think><answer></answer>",
        "<think>3+5=8</think><answer>\n</answer>",
        "The answer: " + GOOD,
        GOOD + " I am sure.",
        GOOD + "<eos>",
        GOOD + "<pad>",
        GOOD + "</think>",
        GOOD + "<|im_end|> 8",
        GOOD + GOOD,
        "<think><think>3+5=8</think></think><answer>8</answer>",
        "<think>3+5=8</think><answer>8</answer><answer>8</answer>",
        "<answer>8</answer><think>3+5=8</think>",
        "<THINK>3+5=8</THINK><answer>8</answer>",
    ],
)
def test_refused(text: str):
    assert think_answer_format(sample(text)) == 0.0


@pytest.mark.parametrize(
    ("end", "value"), [("<think>\n", 1.0), ("<think>", 1.0), ("<think>\n\n</think>\n\n", 0.0), ("", 0.0)]
)
def test_a_prompt_that_begins_the_thoughts_has_begun_the_format(end: str, value: float):
    begun = sample("a short sum\n</think>\n<answer>8</answer>")
    begun = replace(begun, prompt=replace(begun.prompt, text=f"3+5=?<|assistant|>\n{end}"))
    assert think_answer_format(begun) == value
    assert accuracy(begun, StrictOptions()).value == value
    assert think_answer_format(replace(begun, text=GOOD)) == 1.0 - value


def test_strict_thoughts_do_not_mention_the_answers_tags():
    assert think_answer_format(sample(GOOD), strict=True) == 1.0
    assert think_answer_format(sample("<think>In <answer>.</think><answer>8</answer>"), strict=True) == 0.0


def test_cut_by_length_never_counts():
    assert think_answer_format(sample(GOOD, finish_reason="length")) == 0.0
