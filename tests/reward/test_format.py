"""The think-answer format: nothing before, between or behind the two pairs of tags."""

from __future__ import annotations

from array import array

import pytest

from grpo_mega.reward.format import think_answer_format
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


def test_strict_thoughts_do_not_mention_the_answers_tags():
    assert think_answer_format(sample(GOOD), strict=True) == 1.0
    assert think_answer_format(sample("<think>In <answer>.</think><answer>8</answer>"), strict=True) == 0.0


def test_cut_by_length_never_counts():
    assert think_answer_format(sample(GOOD, finish_reason="length")) == 0.0
