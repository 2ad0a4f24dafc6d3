"""Chat templates with what matters of released models': roles, joints, what is done to contents and thoughts."""

from __future__ import annotations

CHATML = (
    "{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\\n' + CONTENT + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
QWEN25 = CHATML.replace("CONTENT", "m.content")
# Thoughts before the user's last message are dropped.
QWEN3 = (
    "{%- set ns = namespace(last=0) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
) + CHATML.replace("CONTENT", "(m.content if loop.index0 > ns.last else m.content.split('</think>')[-1].lstrip('\\n'))")
LLAMA3 = (
    "{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) + '<|eot_id|>' }}"
    "{%- else %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
DEEPSEEK = (
    "{%- for m in messages %}{%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}"
    "{%- elif m.role == 'tool' %}"
    "{{- '<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>' + m.content }}"
    "{{- '<｜tool▁output▁end｜><｜tool▁outputs▁end｜>' }}"
    "{%- else %}{{- '<｜Assistant｜>' + CONTENT + '<｜end▁of▁sentence｜>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{- '<｜Assistant｜>' }}{%- endif %}"
)
V3 = DEEPSEEK.replace("CONTENT", "m.content")
R1 = DEEPSEEK.replace("CONTENT", "m.content.split('</think>')[-1]")
GEMMA = (
    "{%- for m in messages %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif %}"
    "{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim"
    " + '<end_of_turn>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"
)
MISTRAL = (
    "{%- for m in messages %}{%- if m.role == 'user' %}{{- '[INST] ' + m.content + '[/INST]' }}"
    "{%- elif m.role == 'tool' %}{%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
    "{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}"
    "{%- else %}{{- ' ' + m.content + eos_token }}{%- endif %}{%- endfor %}"
)
GLM = (
    "{{- '[gMASK]<sop>' }}{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{%- else %}{{- '<|' + m.role + '|>\\n' + m.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
GPT_OSS = (
    "{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{{- raise_exception('Message has tool role, but there was no previous assistant message with a tool call!') }}"
    "{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)

RESPONSE = "<|im_end|>\n<|im_start|>user\n<tool_response>\n{reply}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
OUTPUT = (
    "<｜end▁of▁sentence｜><｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>{reply}"
    "<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
)

CLOSE = "</tool_call>"
"""What ends a call, for the templates below."""
ACCEPTED = {
    "qwen2.5": (QWEN25, "tool", False, RESPONSE),
    "qwen3": (QWEN3, "tool", False, RESPONSE),
    "deepseek-v3": (V3, "tool", False, OUTPUT),
    "deepseek-r1": (R1, "tool", True, OUTPUT),
    "gemma": (
        GEMMA, "user", False, "<end_of_turn>\n<start_of_turn>user\n{reply}<end_of_turn>\n<start_of_turn>model\n"
    ),
    "glm": (GLM, "tool", False, "<|observation|>\n<tool_response>\n{reply}\n</tool_response><|assistant|>"),
}  # fmt: skip
"""Model -> its template, the role of a reply, whether thoughts are kept, and what then stands around a reply."""
TOKENS = [
    CLOSE, "<tool_response>", "</tool_response>", "<start_of_turn>", "<end_of_turn>",
    "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>",
    "<｜tool▁outputs▁begin｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>",
    "[gMASK]", "<sop>", "<|observation|>", "<|user|>", "<|assistant|>",
]  # fmt: skip
"""Special tokens of these templates, besides those of every made tokenizer."""
