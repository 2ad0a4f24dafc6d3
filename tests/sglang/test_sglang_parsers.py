"""SGLang's tool-call parsers on each model's format: calls, plain answers, and malformed calls."""

from __future__ import annotations

import json
from array import array
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from made_tokenizer import write_tokenizer

from grpo_mega.config.schema import EnvironmentConfig
from grpo_mega.data.huggingface import HuggingFaceTokenizer
from grpo_mega.environment.calls import calls_of_sglang, load, schemas
from grpo_mega.environment.conversation import Conversation
from grpo_mega.errors import InputError
from grpo_mega.rollout.engine import TURN
from grpo_mega.types import Prompt, Sample

TOOLS = "made_tools:add,made_tools:look"
ADD, LOOK = {"name": "add", "arguments": {"a": 3, "b": 4}}, {"name": "look", "arguments": {"word": "sum"}}
THOUGHT = {"name": "add", "arguments": {"a": "</think>", "b": 4}}
UNREAD = {"name": "", "arguments": {}}
ENDS = (
    "<|im_end|>",
    "</tool_call>",
    "<|observation|>",
    "<|tool_calls_section_end|>",
    "<|eot_id|>",
    "</s>",
    "<|call|>",
    "<|return|>",
)
LLAMA = '{"name": "add", "parameters": {"a": 3, "b": 4}}'
QWEN = "<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n<parameter=b>\n4\n</parameter>\n</function>\n"
GLM = "<tool_call>{}\n<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n{}</tool_call>"
GLM_ADD = GLM.format("add", "a", 3, "<arg_key>b</arg_key>\n<arg_value>4</arg_value>\n")
KIMI = '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 3, "b": 4}<|tool_call_end|>'
HARMONY = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 3, "b": 4}<|call|>'


@pytest.fixture(autouse=True)
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module with two tools, which processes find, too."""
    (tmp_path / "made_tools.py").write_text('''
def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One number.
        b: The other.
    """
    return a + b


def look(word: str) -> str:
    """Looks a word up.

    Args:
        word: The word.
    """
    return f"{word}?"
''')
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("parser", "turn", "expected"),
    [
        ("qwen3_coder", f"I add.\n{QWEN}</tool_call>", [ADD]),
        ("glm45", GLM_ADD, [ADD]),
        ("glm45", f"{GLM.format('look', 'word', 'sum', '')}{GLM_ADD}<|observation|>", [LOOK, ADD]),
        ("kimi_k2", f"<|tool_calls_section_begin|>{KIMI}<|tool_calls_section_end|>", [ADD]),
        ("llama3", f"{LLAMA}<|eot_id|>", [ADD]),
        ("mistral", f"[TOOL_CALLS] [{json.dumps(ADD)}]</s>", [ADD]),
        ("pythonic", '[add(a=3, b=4), look(word="sum")]<|eot_id|>', [ADD, LOOK]),
        ("gpt-oss", HARMONY, [ADD]),
        ("gpt-oss", f"<|channel|>analysis<|message|>Sum!<|end|><|start|>assistant{HARMONY}", [ADD]),
        ("hermes", f"<tool_call>\n{json.dumps(ADD)}\n</tool_call>", [ADD]),
        ("llama3", f"<think>hm</think>\n\n{LLAMA}<|eot_id|>", [ADD]),
        # The token that ends the turn is not part of an argument.
        ("qwen3_coder", "<tool_call>\n<function=look>\n<parameter=word>\nsum<|im_end|>", [LOOK]),
        ("qwen3_coder", f"<think>t</think>{QWEN.replace('3', '</think>')}</tool_call><|im_end|>", [THOUGHT]),
        # Neither thoughts nor a plain answer are a call.
        ("qwen3_coder", f"<think>\n{QWEN}</tool_call></think>7<|im_end|>", []),
        ("qwen3_coder", f"<think>\n{QWEN}</tool_call><|im_end|>", []),
        ("llama3", "It is 7.<|eot_id|>", []),
        ("gpt-oss", "<|channel|>final<|message|>It is 7.<|return|>", []),
        ("gpt-oss", "<|channel|>analysis to=functions.add <|message|>{}<|call|>", [UNREAD]),
        ("llama3", '{"answer": 7}<|eot_id|>', [UNREAD]),
        # The model reads what is wrong with its call.
        ("qwen3_coder", "<tool_call>\nadd(3, 4)\n</tool_call>", [UNREAD]),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "argum</s>', [UNREAD]),
        ("hermes", '<tool_call>\n{"name": "cut", "arguments": {}}\n</tool_call>', [{"name": "cut", "arguments": {}}]),
    ],
)
def test_calls_of_a_turn(parser: str, turn: str, expected: list[dict[str, Any]]) -> None:
    (end,) = [end for end in ENDS if turn.endswith(end)]
    found = calls_of_sglang(turn.removesuffix(end), end, parser, schemas(load(TOOLS)))
    assert json.loads(found or "[]") == expected


@pytest.mark.parametrize(
    ("turn", "reason", "reply"),
    [
        (f"{QWEN}</tool_call>", TURN, "7"),
        ("It is 7.", "stop", ""),
        ("<tool_call>add(3, 4)", TURN, "error: the call cannot be read; the tools are add, look"),
    ],
)
def test_a_turn_without_a_call_ends_the_sample(tmp_path: Path, turn: str, reason: str, reply: str) -> None:
    write_tokenizer(tmp_path, with_bos=False)
    tokenizer = HuggingFaceTokenizer(tmp_path, "{prompt}")
    ids = array("i", [*tokenizer.encode(turn), tokenizer.token_id("<|im_end|>")])
    prompt = Prompt("p/0", (1,), "", "?", "t", asked="?")
    sample = Sample(prompt, 0, ids, array("f", [-1.0] * len(ids)), "stop", ((0, 0),), turn, number=0)
    config = EnvironmentConfig(
        path=TOOLS, close="<|im_end|>", tool_call_parser="qwen3_coder", max_reply_tokens=99, at_once=1
    )
    with closing(Conversation(config, tokenizer, 999, 0)) as conversation:
        (after,) = conversation.go_on([sample], 999)
    assert after.finish_reason == reason
    assert tokenizer.decode(after.token_ids[len(ids) :]) == reply
    assert len(after.calls) == (reason == TURN)


@pytest.mark.parametrize("parser", ["qwen9", "", "response_template"])
def test_a_parser_that_sglang_does_not_have_is_refused(parser: str) -> None:
    with pytest.raises(
        InputError, match=rf"tool_call_parser={parser}: SGLang has no such parser; choose one of .*glm45"
    ):
        calls_of_sglang("", "", parser, load(TOOLS))


def test_a_game_that_takes_the_text_of_a_turn_is_refused(tmp_path: Path) -> None:
    game = "class Game:\n    def reset(self, *, seed=None, options=None): ...\n    def step(self, action): ...\n"
    (tmp_path / "made_game.py").write_text(game)
    with pytest.raises(InputError, match=r"glm45: the action of this environment is the raw text of a turn"):
        calls_of_sglang("", "", "glm45", load("made_game:Game"))
