"""An agent's chat as the tokens of a sample: what it requests, and the turns that it gets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from grpo_mega.config.schema import EnvironmentConfig
from grpo_mega.data.chat import Turn, with_opening
from grpo_mega.data.tokenizer import Tokenizer
from grpo_mega.types import Prompt, Sample, sampled_spans

THOUGHTS = (
    "environment.keep_thoughts=true: the chat template drops the thoughts before a call. In training the policy sees "
    "all its thoughts when it goes on after a reply; wherever the template writes the chat, as in a server, it does not"
)
"""Warning of a template whose chats differ from those of training."""
DROPPED = (
    "the chat template drops the thoughts of earlier turns: after a turn with thoughts an agent's chat begins a new "
    "context, whose tokens are all computed again; environment.keep_thoughts=true has the policy go on after them"
)
"""Warning of a template that drops thoughts which are not kept."""
UNCONTINUED = (
    "the chat template cannot go on after a turn, as what it writes for a message depends on those before: each of the "
    "agent's requests begins a new context, whose tokens are all computed again"
)
"""Warning of a template with which every request is a piece of its own."""


def check_chat(config: EnvironmentConfig, tokenizer: Tokenizer) -> tuple[str, ...]:
    """A warning if the chat template rewrites a chat that goes on.

    Raises:
        InputError: The tokenizer cannot write a chat.
    """
    message = {"role": "user", "content": "1"}
    tokenizer.requested([message], [])
    if tokenizer.continued([message], config.close, True) is None:
        return (UNCONTINUED,)
    if tokenizer.continued([message], config.close, False) is None:
        return (THOUGHTS if config.keep_thoughts else DROPPED,)
    return ()


def begun(prompt: Prompt, said: str, tokenizer: Tokenizer, is_agent: bool) -> tuple[str, list[int]]:
    """Text and token ids of a prompt with what the environment adds, or of an agent's first request in its place.

    Raises:
        InputError: The tokenizer cannot write it.
    """
    if is_agent:
        first = json.loads(said)
        return tokenizer.requested(first["messages"], first["tools"])
    problem = with_opening(prompt.asked, said)
    return tokenizer.prompt(problem if isinstance(problem, str) else [Turn(**turn) for turn in problem])


def context_after(
    sample: Sample, asked: Mapping[str, Any], tokenizer: Tokenizer, keep_thoughts: bool
) -> tuple[list[int], bool]:
    """Tokens of a request (`Played.requested`) after a sample's last turn, and whether its context begins anew there.

    Raises:
        InputError: The chat template refuses the messages, or they cannot be encoded.
    """
    if asked["new"] is not None:
        end = tokenizer.decode([sample.token_ids[-1]])
        kept = keep_thoughts or "</think>" not in sample.text
        ids = tokenizer.continued(asked["messages"][-asked["new"] :], end, kept)
        if ids is not None:
            return ids, False
    return tokenizer.requested(asked["messages"], asked["tools"])[1], True


def turns_of(sample: Sample, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The policy's turns in a sample, as `agent_reply` takes them."""
    turns: list[dict[str, Any]] = []
    for number, (first, end) in enumerate(sampled_spans(len(sample.token_ids), sample.given)):
        begin = max((at for at in sample.restarts if at < first), default=-len(sample.prompt.token_ids))
        call = sample.calls[number] if number < len(sample.calls) else None
        # Those that the agent has got have ended with a stop token.
        cut = call is None and sample.finish_reason != "stop"
        said = sample.token_ids[first : end if cut else end - 1]
        turns.append(
            {
                # Without tokens that only the model has: it may have more than its tokenizer.
                "text": tokenizer.decode([one for one in said if one < tokenizer.vocab_size]),
                "token_ids": sample.token_ids[first:end].tolist(),
                "logprobs": sample.logprobs[first:end].tolist(),
                "prompt_tokens": first - begin,
                "cut": cut,
                "then": call.then if call else "",
            }
        )
    return turns
