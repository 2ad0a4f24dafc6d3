"""The chat templates of released models, as TRL ships them, do with replies what tests/chat_templates.py says."""

from __future__ import annotations

from pathlib import Path

import pytest
from chat_templates import ACCEPTED, CLOSE
from made_tokenizer import write_tokenizer

from grpo_mega.data.huggingface import HuggingFaceTokenizer
from grpo_mega.environment.calls import form_of
from grpo_mega.errors import InputError

pytestmark = pytest.mark.long


def tokenizer_with(template: Path, folder: Path) -> HuggingFaceTokenizer:
    write_tokenizer(folder, with_bos=False)
    (folder / "chat_template.jinja").write_text(template.read_text())
    return HuggingFaceTokenizer(folder, "chat")


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("qwen2_5", "qwen2.5"),
        ("qwen3", "qwen3"),
        ("deepseekv3", "deepseek-r1"),
        ("deepseek_r1_distill", "deepseek-r1"),
        ("gemma", "gemma"),
        ("gemma3", "gemma"),
        ("glm4moe", "glm"),
    ],
)
def test_a_reply_stands_where_the_excerpt_of_the_family_puts_it(
    public: Path, tmp_path: Path, name: str, like: str
) -> None:
    _, role, keep, expected = ACCEPTED[like]
    tokenizer = tokenizer_with(public / f"{name}.jinja", tmp_path)
    assert tokenizer.reply_template(role, CLOSE, keep) == expected
    if keep:
        with pytest.raises(InputError, match="drops thoughts"):
            tokenizer.reply_template(role, CLOSE, False)


@pytest.mark.parametrize("name", ["llama3_1", "llama3_2", "gptoss"])
def test_what_new_writes_around_a_reply_is_what_the_template_writes(public: Path, tmp_path: Path, name: str) -> None:
    """The call is passed as `tool_calls`, which some templates require; the reply needs no JSON escapes."""
    tokenizer = tokenizer_with(public / f"{name}.jinja", tmp_path)
    with pytest.raises(InputError, match=r"changes the reply|fails"):
        tokenizer.reply_template("tool", CLOSE, False)
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "a"}}}
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    asked = tokenizer._applied([*chat, {"role": "tool", "content": "12 a"}], ask=True)
    form = form_of((public / f"{name}.jinja").read_text(), ["look_up"])
    assert asked.endswith(form["close"] + form["reply"].replace("{reply}", "12 a"))
