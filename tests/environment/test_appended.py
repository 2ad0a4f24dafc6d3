"""Token ids are only appended: nothing that the policy sampled, or was given, is encoded again."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import pytest
import torch
from chat_templates import ACCEPTED, CLOSE, TOKENS
from hypothesis import given
from hypothesis import strategies as st
from made_tokenizer import ASKING, CHAT, SPECIAL, write_tokenizer

from grpo_mega.config.schema import EnvironmentConfig
from grpo_mega.data.huggingface import HuggingFaceTokenizer
from grpo_mega.environment.conversation import CUT, Conversation
from grpo_mega.rollout.engine import TURN, Wanted
from grpo_mega.types import Prompt, Sample

END = "<|im_end|>"
ALL_SPECIAL = [*SPECIAL, *TOKENS]
WAYS = {
    "text": (CHAT + ASKING, END, "{reply}<|im_start|>", False, "{reply}<|im_start|>"),
    "tool": (CHAT + ASKING, END, "tool", False, f"\n<|im_start|>tool\n{{reply}}{END}\n<|im_start|>assistant\n"),
    **{name: (template, CLOSE, *others) for name, (template, *others) in ACCEPTED.items()},
}
"""Name -> chat template, what ends a call, how replies are written, whether thoughts are kept, and what then stands
around each reply."""


@dataclass(frozen=True)
class Talk:
    """A conversation with an environment that says what it is told; `framed` are the special tokens around a reply."""

    conversation: Conversation
    tokenizer: HuggingFaceTokenizer
    close: int
    framed: list[int]

    def turn(self, sample: Sample | None, ids: list[int]) -> tuple[Wanted, Sample]:
        """What the policy goes on after, and the sample once it has called with these tokens and got its reply."""
        text, asked = self.tokenizer.prompt("What is 3+5?")
        wanted = Wanted(Prompt("p/0", tuple(asked), text, "5", "sums", asked="What is 3+5?"), 0, so_far=sample)
        called = array("i", [*ids, self.close])
        experts = experts_of([*wanted.prefix, *called])
        logprobs = array("f", [-1.0] * len(called))
        sampled = wanted.sample(called, logprobs, "stop", 0, self.tokenizer.decode, experts)
        (after,) = self.conversation.go_on([sampled], 10**6)
        assert after.finish_reason == TURN
        return wanted, after

    def special(self, sample: Sample) -> list[list[int]]:
        """The special tokens in each reply."""
        known = {self.tokenizer.token_id(token) for token in ALL_SPECIAL}
        return [[one for one in sample.token_ids[first:end] if one in known] for first, end in sample.given]


@pytest.fixture(
    scope="module", params=["text", "tool", *(pytest.param(name, marks=pytest.mark.long) for name in ACCEPTED)]
)
def talk(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Talk]:
    template, close, reply, keep, around = WAYS[request.param]
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), with_bos=True, special=ALL_SPECIAL)
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = HuggingFaceTokenizer(folder, "chat")
    framed = [tokenizer.token_id(token) for token in re.findall("|".join(map(re.escape, ALL_SPECIAL)), around)]
    limits = {"max_calls": 99, "max_reply_tokens": 100, "at_once": 1}
    written = {"open": "", "close": close, "reply": reply, "keep_thoughts": keep}
    config = EnvironmentConfig(path="made_environments:Begins", **written, **limits)
    with closing(Conversation(config, tokenizer, 10**6, 0)) as conversation:
        yield Talk(conversation, tokenizer, tokenizer.token_id(close), framed)


WORDS = st.sampled_from(["What", "conversation", "assistant", *ALL_SPECIAL])
CALLS = st.sampled_from([
    '{"name": "act",  "arguments":{"what":"What"}}',
    ' {"name":"act","arguments" : {"what": "What", "new":false,"old" :true,  "other":null}}',
    '[{"name": "act", "arguments":{"what": "What"}} ,{"name":"act",  "arguments": {"what":null}}]',
])  # fmt: skip
"""None is as `json.dumps` would write it."""


def experts_of(row: list[int]) -> torch.Tensor:
    """Experts that a forward pass sends all tokens but the last to: like a model's, they depend on what is before."""
    return (torch.tensor(row[:-1]).cumsum(0) % 101).short().view(-1, 1, 1)


@given(st.lists(st.tuples(CALLS, st.just("")) | st.tuples(WORDS, st.text(max_size=9)), min_size=1, max_size=6))
def test_the_prompt_of_each_turn_begins_the_final_row(talk: Talk, turns: list[tuple[str, str]]) -> None:
    """Also where the policy has split words in another way than the tokenizer does, or has written calls as nothing
    else writes them; and so do the experts that the engine has sent the row's tokens to."""
    tokenizer = talk.tokenizer
    sample: Sample | None = None
    prefixes: list[list[int]] = []
    for word, rest in turns:
        # Character by character, and so never as the tokenizer has it.
        pieces = [piece for one in word for piece in tokenizer.encode(one)]
        assert tokenizer.encode(tokenizer.decode(pieces)) != pieces
        ids = [*pieces, *tokenizer.reply(rest, "{reply}")]
        wanted, sample = talk.turn(sample, ids)
        prefixes += [wanted.prefix, [*wanted.prefix, *ids, talk.close]]
    assert sample
    row = [*sample.prompt.token_ids, *sample.token_ids]
    assert prefixes[0] == [*sample.prompt.token_ids]
    assert all(row[: len(prefix)] == prefix for prefix in prefixes)
    # After the last turn, nothing has read its reply.
    assert sample.experts is not None
    assert torch.equal(sample.experts, experts_of(prefixes[-1]))
    assert len(sample.given) == len(sample.calls) == len(turns)
    assert talk.special(sample) == [talk.framed] * len(turns), "none in the reply itself"


@given(st.sampled_from(ALL_SPECIAL), st.text(max_size=5), st.sampled_from(ALL_SPECIAL))
def test_a_reply_without_its_middle_forges_no_special_token(talk: Talk, first: str, text: str, last: str) -> None:
    """What is left of a reply that was too long is encoded a second time."""
    spelt = f"{first}{text}{last}" * 20
    _, sample = talk.turn(None, talk.tokenizer.reply(spelt, "{reply}"))
    (given,) = sample.given
    reply = talk.tokenizer.decode(sample.token_ids[slice(*given)])
    head, cut, tail = reply.partition(CUT)
    assert cut
    assert first in head
    assert last in tail
    assert talk.special(sample) == [talk.framed]
