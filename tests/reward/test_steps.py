"""Rewards of steps: from the characters at which terms let them end to the tokens that GRPO rewards."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_tokenizer import write_tokenizer
from refusals import refused
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from grpo_mega.config.schema import RewardConfig, RewardTerm
from grpo_mega.data.huggingface import HuggingFaceTokenizer
from grpo_mega.data.tokenizer import CharTokenizer
from grpo_mega.reward.compose import Reward, build_reward
from grpo_mega.reward.steps import steps_of_tokens
from grpo_mega.reward.verdict import Verdict, read_verdict
from grpo_mega.step_ends import STRETCH, last_tokens
from grpo_mega.types import Prompt, Sample

BYTES = (b"a", b"\xf0", b"\x9f\x98", b"\x80", b"\xef\xbf\xbd", b" ", b"\xe2\x82\xac")
TEXTS = st.text(st.sampled_from("ab \n€é😀字\ufffd"), min_size=1, max_size=80).map(lambda text: text * 3)


def decoded(parts: Sequence[bytes], ids: Sequence[int]) -> str:
    """As byte-level tokenizers decode: what is no character, or a part of one, becomes U+FFFD."""
    return b"".join(parts[i] for i in ids).decode(errors="replace")


def with_bytes_alone(parts: Sequence[bytes], ids: Sequence[int]) -> str:
    """As sentencepiece decodes: without the first space; of bytes that are no character, each becomes U+FFFD."""
    whole = b"".join(parts[i] for i in ids)
    text, at = "", 0
    while at < len(whole):
        for size in range(1, 5):
            try:
                text, at = text + whole[at : at + size].decode(), at + size
                break
            except UnicodeDecodeError:
                continue
        else:
            text, at = text + "\ufffd", at + 1
    return text.removeprefix(" ")


def cut(whole: bytes, sizes: list[int]) -> list[bytes]:
    parts, at = [], 0
    while at < len(whole):
        size = sizes[len(parts) % len(sizes)]
        parts.append(whole[at : at + size])
        at += size
    return parts


@given(
    text=TEXTS,
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=9).filter(any),
    spell=st.sampled_from([decoded, with_bytes_alone]),
    some=st.sets(st.integers(1, 240), min_size=1, max_size=20),
)
def test_a_step_ends_with_the_token_that_completes_its_last_character(
    text: str, sizes: list[int], spell: Callable[[Sequence[bytes], Sequence[int]], str], some: set[int]
) -> None:
    text = text.replace("\ufffd", "")
    parts = cut(text.encode(), sizes)
    text = spell(parts, range(len(parts)))
    ends = sorted(end for end in some if end <= len(text))
    dropped = len(b"".join(parts)) - len(text.encode())
    complete = [dropped + len(text[:end].encode()) for end in ends]
    lengths = [len(b"".join(parts[: i + 1])) for i in range(len(parts))]
    expected = [next(i for i, length in enumerate(lengths) if length >= needed) for needed in complete]
    assert last_tokens(text, range(len(parts)), partial(spell, parts), ends) == expected


@given(
    whole=st.lists(st.sampled_from(BYTES), min_size=1).map(lambda some: b"".join(some) * 9),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=9),
    spell=st.sampled_from([decoded, with_bytes_alone]),
)
def test_bytes_that_are_no_text_do_not_end_a_run(
    whole: bytes, sizes: list[int], spell: Callable[[Sequence[bytes], Sequence[int]], str]
) -> None:
    parts = cut(whole, sizes)
    spelled = cache(partial(spell, parts))
    text = spelled(range(len(parts)))
    tokens = last_tokens(text, range(len(parts)), spelled, range(1, len(text) + 1))
    assert all(a <= b for a, b in pairwise(tokens))
    for end, token in enumerate(tokens, 1):
        assert spelled(range(token + 1)).startswith(text[:end])


def test_the_tokens_that_are_decoded_are_some_times_those_there_are() -> None:
    parts = [b"ab", b"\xe2\x82", b"\xac", b" "] * 2500
    text, counted = decoded(parts, range(len(parts))), []

    def counting(ids: Sequence[int]) -> str:
        counted.append(len(ids))
        return decoded(parts, ids)

    ends = range(len(text) // 100, len(text) + 1, len(text) // 100)
    assert len(last_tokens(text, range(len(parts)), counting, ends)) == 100
    assert sum(counted) < 8 * len(parts) + 100 * 32 * STRETCH
    assert len(counted) < len(parts) / 2


def test_a_decoder_of_wholes_alone_is_refused() -> None:
    def numbering(ids: Sequence[int]) -> str:
        return "".join(f"{place}{i % 7}" for place, i in enumerate(ids))

    text = numbering(range(300))
    with refused("tokens 128 to 299 of a completion | the tokenizer spells"):
        last_tokens(text, range(300), numbering, [len(text)])


def sentencepiece() -> Callable[[Sequence[int]], str]:
    """A tokenizer as Llama 2 has it: spaces before words, bytes for what it has no token for."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    made.train_from_iterator(["step one is 3 + 5"] * 9, trainers.BpeTrainer(special_tokens=["<unk>", *byte_tokens]))
    return made


def test_real_tokenizers(tmp_path: Path) -> None:
    text = "".join(f"Step {i}: 3 + {i} = {3 + i} €, so 字😀!\n" for i in range(40))
    ends = [i + 1 for i, character in enumerate(text) if character == "\n"]
    byte_level = HuggingFaceTokenizer(write_tokenizer(tmp_path, with_bos=True), "{prompt}")
    metaspace = sentencepiece()
    for encode, decode in (
        (byte_level.encode, byte_level.decode),
        (lambda text: metaspace.encode(text).ids, lambda ids: metaspace.decode([*ids], skip_special_tokens=False)),
    ):
        ids = encode(text)
        assert decode(ids) == text
        tokens = last_tokens(text, ids, decode, ends)
        for end, token in zip(ends, tokens, strict=True):
            assert decode(ids[: token + 1]).startswith(text[:end])
            assert not decode(ids[:token]).startswith(text[:end])


CHARACTERS = CharTokenizer()


def sample(text: str, finish_reason: str = "stop") -> Sample:
    ids = array("i", CHARACTERS.encode(text + "<eos>" * (finish_reason == "stop")))
    prompt = Prompt("p", (1,), "<bos>3+5+2=?", "10", "chain_sum")
    return Sample(prompt, 0, ids, array("f", [0.0] * len(ids)), finish_reason, ((0, 0),), text)


def test_steps_of_all_terms_are_one_list_and_a_term_without_steps_ends_with_the_completion() -> None:
    stepwise, whole = Verdict(0.5, steps=((2, 1.0), (5, -1.0))), Verdict(3.0)
    other, metric = Verdict(0.0, steps=((2, 0.5),)), Verdict(1.0, steps=((1, 9.0),))
    verdicts = [(1.0, stepwise), (0.5, whole), (2.0, other), (0.0, metric), (0.25, Verdict(2.0))]
    assert steps_of_tokens(sample("12345"), verdicts, CHARACTERS.decode) == ((1, 2.0), (4, -1.0), (5, 2.0))
    cut_off = steps_of_tokens(sample("12345", "length"), verdicts, CHARACTERS.decode)
    assert cut_off == ((1, 2.0), (4, 1.0)), "the last step ends with the completion"
    assert steps_of_tokens(sample("12345"), [(1.0, whole), (0.0, stepwise)], CHARACTERS.decode) == ()


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step_rewards_of_users.py").write_text(
        "from grpo_mega.reward.verdict import Verdict\n"
        "def pairs(sample): return {'value': 0.5, 'steps': [[2, 1], (4, 0.5)]}\n"
        "def verdict(sample): return Verdict(0.5, 'two', steps=((2, 1.0), (4, 0.5)))\n"
        "def outside(sample): return {'value': 0.5, 'steps': [[2, 1], [len(sample.text) + 1, 0]]}\n"
        "def nan(sample): return {'value': 0.5, 'steps': [[2, float('nan')]]}\n"
        "def order(sample): return {'value': 0.5, 'steps': [[4, 1], [2, 1]]}\n"
        "def huge(sample): return {'value': 0.5, 'steps': [[10**5000, 1]]}\n"
        "def table(sample): import numpy; return {'value': 0.5, 'steps': numpy.ones((1, 2))}\n"
        "def nought(sample): return {'value': 0.5, 'steps': 0}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def reward(name: str, on_error: str = "stop") -> Reward:
    terms = [RewardTerm("mine", 2.0, f"step_rewards_of_users:{name}"), RewardTerm("sum_steps", 0.0)]
    return build_reward(RewardConfig(terms, "mine", on_error=on_error))


@pytest.mark.parametrize("name", ["pairs", "verdict"])
def test_a_function_of_the_users_scores_steps(functions: None, name: str) -> None:
    built = reward(name)
    (score,) = built.score([sample("12345")], CHARACTERS.decode)
    assert (score.total, score.terms["mine"], score.steps) == (1.0, 0.5, ((1, 2.0), (3, 1.0)))
    (score,) = built.score([sample("12345")])
    assert (score.total, score.steps) == (1.0, ()), "nobody has asked for them"


def test_tokens_that_cannot_be_told_apart_are_an_error_that_names_the_sample(functions: None) -> None:
    def whole(ids: Sequence[int]) -> str:
        return "12345" if len(ids) == 5 else "?"

    with refused("prompt 'p', sample 0 | the tokenizer spells"):
        reward("pairs").score([sample("12345")], whole)
    (score,) = reward("pairs", "leave_out").score([sample("12345")], whole)
    assert "the tokenizer spells them" in score.unscorable


@pytest.mark.parametrize("text", ["", "\n", "1+1=2\n", "1+1=2\n\n2+2=4", "?=\n\n=1"])
def test_the_documented_function_takes_every_completion(text: str) -> None:
    document = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", document, re.DOTALL) if "def lines(" in block)
    made: dict[str, Any] = {}
    exec(code, made)
    verdict = read_verdict(made["lines"](sample(text)))
    assert sum(reward for _, reward in verdict.steps) == sum(line.count("=") == 1 for line in text.splitlines())
    assert not verdict.steps or verdict.steps[-1][0] == len(text)


WRONG = {
    "outside": "its step 2 ends at character 6, and the completion has 5",
    "nan": "its steps must be pairs .* number 1 is",
    "order": "its steps must be pairs .* number 2 is",
    "huge": "its steps must be pairs .* number 1 is a list",
    "table": "its steps must be pairs .* number 1 is array",
    "nought": "its steps must be pairs .* number 1 is 0",
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_steps_are_an_error_that_names_term_and_sample_whether_or_not_they_are_asked_for(
    functions: None, name: str
) -> None:
    for decode in (None, CHARACTERS.decode):
        with pytest.raises(ValueError, match=f"'mine', prompt 'p', sample 0: .*{WRONG[name]}"):
            reward(name).score([sample("12345")], decode)
    (score,) = reward(name, "leave_out").score([sample("12345")], CHARACTERS.decode)
    assert score.unscorable
    assert score.steps == ()
