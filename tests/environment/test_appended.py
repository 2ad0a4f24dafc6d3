"""Token ids are only appended: nothing that the policy sampled, or was given, is encoded again."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_tokenizer import CHAT, SPECIAL, write_tokenizer

from grpo_mega.config.schema import EnvironmentConfig
from grpo_mega.data.huggingface import HuggingFaceTokenizer
from grpo_mega.environment.conversation import Conversation
from grpo_mega.rollout.engine import TURN, Wanted
from grpo_mega.types import Prompt, Sample

ASKING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
END = "<|im_end|>"
REPLIES = {"{reply}<|im_start|>": 1, "tool": 3}
"""How replies are written -> number of special tokens around each."""
Talk = tuple[Conversation, HuggingFaceTokenizer, int]


@pytest.fixture(scope="module", params=[*REPLIES])
def talk(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Talk]:
    """A conversation with an environment that says what it is told."""
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), with_bos=True)
    (folder / "chat_template.jinja").write_text(CHAT + ASKING)
    tokenizer = HuggingFaceTokenizer(folder, "chat")
    config = EnvironmentConfig(
        path="made_environments:Begins", open="", close=END, reply=request.param, max_reply_tokens=50, at_once=1
    )
    with closing(Conversation(config, tokenizer, 10**6, 0)) as conversation:
        yield conversation, tokenizer, REPLIES[request.param]


WORDS = st.sampled_from(["What", "conversation", "assistant", *SPECIAL])


def experts_of(row: list[int]) -> torch.Tensor:
    """Experts that a forward pass sends all tokens but the last to: like a model's, they depend on what is before."""
    return (torch.tensor(row[:-1]).cumsum(0) % 101).short().view(-1, 1, 1)


@given(st.lists(st.tuples(WORDS, st.text(max_size=9)), min_size=1, max_size=6))
def test_the_prompt_of_each_turn_begins_the_final_row(talk: Talk, turns: list[tuple[str, str]]) -> None:
    """Also where the policy has split words in another way than the tokenizer does; and so do the experts that the
    engine has sent the row's tokens to."""
    conversation, tokenizer, framed = talk
    text, asked = tokenizer.prompt("What is 3+5?")
    prompt = Prompt("p/0", tuple(asked), text, "5", "sums", asked="What is 3+5?")
    sample: Sample | None = None
    prefixes: list[list[int]] = []
    for word, rest in turns:
        # Character by character, and so never as the tokenizer has it.
        pieces = [piece for one in word for piece in tokenizer.encode(one)]
        assert tokenizer.encode(tokenizer.decode(pieces)) != pieces
        ids = array("i", [*pieces, *tokenizer.reply(rest, "{reply}"), tokenizer.token_id(END)])
        wanted = Wanted(prompt, 0, so_far=sample)
        prefixes.append(wanted.prefix)
        logprobs = array("f", [-1.0] * len(ids))
        prefixes.append([*wanted.prefix, *ids])
        sampled = wanted.sample(ids, logprobs, "stop", 0, tokenizer.decode, experts_of(prefixes[-1]))
        (sample,) = conversation.go_on([sampled], 10**6)
        assert sample.finish_reason == TURN
    assert sample
    row = [*sample.prompt.token_ids, *sample.token_ids]
    assert row[: len(asked)] == asked
    assert all(row[: len(prefix)] == prefix for prefix in prefixes)
    # After the last turn, nothing has read its reply.
    assert sample.experts is not None
    assert torch.equal(sample.experts, experts_of(prefixes[-1]))
    assert len(sample.given) == len(sample.calls) == len(turns)
    specials = {tokenizer.token_id(token) for token in SPECIAL}
    for first, end in sample.given:
        assert sum(token in specials for token in sample.token_ids[first:end]) == framed, "none in the reply itself"
