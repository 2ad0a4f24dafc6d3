"""Settings of the environment that answers the policy's calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from grpo_mega.config.limits import Interval, IsSet, With

IN_USE = With("path", IsSet())


@dataclass
class EnvironmentConfig:
    """Tools or a game that answer the policy in the middle of a completion; see docs/environments.md."""

    path: str | None = None
    """Import path of your environment: `module:Class`, functions `module:first,module:second`, or a function with a
    parameter `base_url`, which is an agent; null for none."""
    open: Annotated[str, IN_USE] = "<tool_call>"
    """Text with which a call begins; the call goes from there to the end of the turn. "" for the whole turn."""
    close: Annotated[str, IN_USE] = "</tool_call>"
    """Token that ends a call, and with it the policy's turn. An agent's turns end with any stop token."""
    tool_call_parser: Annotated[str | None, IN_USE] = None
    """SGLang's parser that reads the calls in a turn, as its `--tool-call-parser`: `qwen3_coder`, `glm45`, `kimi_k2`. A
    turn without a call ends its sample, and `open` is not read. Null for the forms of docs/environments.md."""
    reply: Annotated[str, IN_USE] = "{reply}"
    """What is appended after a call: text with {reply}, in which special tokens are parsed, but never in the reply; or
    the role of a message, `tool` or `user`, which the tokenizer's chat template renders. Not read for an agent."""
    keep_thoughts: Annotated[bool, IN_USE] = False
    """Accept a chat template that leaves earlier thoughts out: the policy sees them in training, but not where the
    template is used. Without it, a dropped thought makes an agent's chat begin anew."""
    replayable: Annotated[bool, IN_USE] = True
    """Whether making its calls again rebuilds an episode. If not, replies are not recorded, and after a stop unfinished
    episodes start over."""
    max_calls: Annotated[int, IN_USE, Interval("[1, inf)")] = 8
    """Most calls in a sample; the next one ends it, as the length limit does. Of an agent, most requests after the
    first."""
    max_reply_tokens: Annotated[int, IN_USE, Interval("[1, inf)")] = 512
    """A longer reply is cut in the middle; an agent's messages are not."""
    seconds: Annotated[float, IN_USE, Interval("(0, inf)")] = 30.0
    """Wall-clock limit of a call, times the calls of its sample so far, which may have to be repeated. A call that
    exceeds it, or ends its process, leaves its sample without a score."""
    cpu_seconds: Annotated[float | None, IN_USE, Interval("(0, inf)")] = 10.0
    """CPU seconds of a call of your environment, in its process. A call that uses more is undone, and the policy reads
    an error. Not applied with `replayable=false`, nor to async environments; null for no limit."""
    at_once: Annotated[int, IN_USE, Interval("[1, inf)")] = 4
    """Processes of each rank that answer calls at once: each one call, or 64 if they are async."""
