"""Pairs of responses: what is read, what is held out, in which order, and what is refused."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tokenizer import ASKING, CHAT, write_tokenizer
from refusals import refused

from grpo_mega.config.schema import PairsConfig
from grpo_mega.data.examples import Pair, Pairs, held_out, load_pairs, pairs_of_files
from grpo_mega.data.huggingface import HuggingFaceTokenizer
from grpo_mega.data.tokenizer import CharTokenizer, Tokenizer
from grpo_mega.errors import InputError

CHARS = CharTokenizer()
ENDS = (CHARS.eos_id,)


def write(folder: Path, *lines: object, name: str = "pairs.jsonl") -> Path:
    path = folder / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def line(number: int, **changes: Any) -> dict[str, Any]:
    return {"prompt": f"{number}+1=?", "chosen": str(number + 1), "rejected": str(number + 2)} | changes


def pairs_of(folder: Path, seed: int = 0, **settings: Any) -> Pairs:
    pairs = PairsConfig(**{"path": str(folder / "pairs.jsonl"), "warmup_steps": 0, "batch_size": 4} | settings)
    return pairs_of_files(pairs, 100, seed, CHARS, ENDS, lambda text: None)


def load(path: Path, tokenizer: Tokenizer = CHARS, longest: int = 100, **settings: Any) -> list[Pair]:
    assert tokenizer.eos_id is not None
    return load_pairs(path, tokenizer, (tokenizer.eos_id,), longest, PairsConfig(**settings))


def prompts(pairs: list[Pair]) -> list[str]:
    return [CHARS.decode(pair.chosen.token_ids[: pair.prompt]) for pair in pairs]


def test_both_responses_follow_the_prompt_and_end_at_the_token_that_is_scored(tmp_path: Path) -> None:
    (pair,) = load(write(tmp_path, {"prompt": "3+5=?", "chosen": "8", "rejected": "9<eos>", "id": "sum", "other": 1}))
    assert CHARS.decode(pair.chosen.token_ids) == "<bos>3+5=?8<eos>"
    assert CHARS.decode(pair.rejected.token_ids) == "<bos>3+5=?9<eos>"
    for row in (pair.chosen, pair.rejected):
        assert row.learned == ((len(row.token_ids) - 1, len(row.token_ids)),)
    assert CHARS.decode(pair.chosen.token_ids[: pair.prompt]) == "<bos>3+5=?"
    assert pair.where == f"{tmp_path}/pairs.jsonl:1"


def test_a_chat_is_asked_as_in_reinforcement_learning(tmp_path: Path) -> None:
    theirs = tokenizer_with_chat(tmp_path / "tokenizer")
    turns = [{"role": "user", "content": "3+5?"}]
    told = {"prompt": turns, "chosen": "8", "rejected": "9"}
    one, other = load(write(tmp_path, told, told | {"prompt": "3+5?"}), theirs)
    assert [*one.chosen.token_ids[: one.prompt]] == theirs.prompt("3+5?")[1]
    assert (one.chosen, one.rejected) == (other.chosen, other.rejected)
    assert theirs.decode(one.rejected.token_ids[one.prompt :]) == "9<|im_end|>"


def tokenizer_with_chat(folder: Path) -> HuggingFaceTokenizer:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(write_tokenizer(folder, with_bos=False))
    theirs.chat_template = CHAT + ASKING
    theirs.save_pretrained(folder)
    return HuggingFaceTokenizer(folder, "chat")


WRONG = [
    (line(1, rejected="2"), ":2: fields 'chosen' and 'rejected' | nothing can be learned"),
    (line(1, rejected="2<eos>"), ":2: fields 'chosen' and 'rejected' | are the same"),
    ({"chosen": "2", "rejected": "3"}, ":2: field 'prompt' | missing"),
    ({"prompt": "1+1=?", "rejected": "3"}, ":2: field 'chosen' | missing"),
    ({"prompt": "1+1=?", "chosen": "3"}, ":2: field 'rejected' | missing"),
    (line(1, chosen=2), ":2: field 'chosen' | write it as a string"),
    (line(1, rejected=" "), ":2: field 'rejected' | empty"),
    (line(1, rejected="é"), ":2: field 'rejected': character 'é' at position 0 | not in the vocabulary"),
    (line(1, rejected="2<eos>3"), ":2: field 'rejected' | '<eos>' ends a completion (rollout.stop), and '3'"),
    (line(1, prompt=[{"role": "user", "content": "1+1=?"}]), ":2: field 'prompt': data.tokenizer=chars | has no chat"),
    (line(1, chosen="2" * 12), "pairs | 1 of 2 pairs are longer than model.context (14"),
    ("[]", "pairs.jsonl:2 | a JSON object"),
    ("{", "pairs.jsonl:2 | not JSON"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_a_line_that_is_no_pair_is_named(tmp_path: Path, wrong: object, message: str) -> None:
    with refused(message) as raised:
        load(write(tmp_path, line(0), wrong), longest=14)
    assert str(tmp_path / "pairs.jsonl") in raised.value.where


def test_too_long_names_the_setting_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"longer than pairs.max_tokens \(9 tokens\): .*pairs.jsonl:2 \(11\); shorten"):
        load(write(tmp_path, line(1), line(1, rejected="2345")), longest=9, max_tokens=9)


def test_files_that_are_empty_missing_or_too_short_are_refused(tmp_path: Path) -> None:
    with refused("pairs.jsonl | the file is empty"):
        load(write(tmp_path))
    with pytest.raises(InputError, match=re.escape("none.jsonl: no such file of pairs")):
        load(tmp_path / "none.jsonl")
    write(tmp_path, *map(line, range(3)))
    with pytest.raises(
        ValueError, match=re.escape("3 pairs to learn from, fewer than pairs.batch_size=4; lower that to 3 or less")
    ):
        pairs_of(tmp_path)
    with pytest.raises(ValueError, match=re.escape("only 1 pairs to learn from, fewer than pairs.batch_size=2")):
        pairs_of(tmp_path, batch_size=2, test_size=2)
    with refused("pairs.warmup_steps=3 | must be below the 3 steps that pairs.epochs=2 of 3"):
        pairs_of(tmp_path, batch_size=2, epochs=2, warmup_steps=3)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_pair_that_is_held_out_and_learned_is_refused(tmp_path: Path, swapped: bool) -> None:
    write(tmp_path, *map(line, range(5)))
    same = line(3, chosen="5", rejected="4") if swapped else line(3)
    write(tmp_path, line(8), same, name="test.jsonl")
    with pytest.raises(ValueError, match=r"test.jsonl:2: the held-out pair is also learned \(.*pairs.jsonl:4\)"):
        pairs_of(tmp_path, test_path=str(tmp_path / "test.jsonl"))
    write(tmp_path, line(8), line(3, rejected="7"), name="test.jsonl")
    assert len(pairs_of(tmp_path, test_path=str(tmp_path / "test.jsonl")).test) == 2
    write(tmp_path, line(8), name="earlier.jsonl")
    with pytest.raises(ValueError, match=r"test.jsonl:1: the held-out pair is also learned \(.*earlier.jsonl:1\)"):
        pairs_of(tmp_path, test_path=str(tmp_path / "test.jsonl"), replay_path=str(tmp_path / "earlier.jsonl"))


@settings(max_examples=30)
@given(of_prompt=st.lists(st.integers(1, 4), min_size=2, max_size=9), size=st.integers(1, 8))
def test_no_prompt_is_both_learned_and_held_out(
    tmp_path_factory: pytest.TempPathFactory, of_prompt: list[int], size: int
) -> None:
    told = [line(i, rejected=f"9{j}") for i, count in enumerate(of_prompt) for j in range(count)]
    pairs = load(write(tmp_path_factory.mktemp("pairs"), *told))
    learned, test = held_out(pairs, size)
    assert not set(prompts(learned)) & set(prompts(test))
    assert sorted(p.where for p in [*learned, *test]) == sorted(p.where for p in pairs)
    most = max(of_prompt) - 1
    assert min(size, len(pairs)) <= len(test) <= size + most
    assert held_out(pairs, size) == (learned, test)


def test_every_pair_is_learned_once_in_an_epoch_in_an_order_of_the_seed(tmp_path: Path) -> None:
    write(tmp_path, *map(line, range(10)))
    one, other = pairs_of(tmp_path, epochs=2), pairs_of(tmp_path, epochs=2, seed=1)
    assert one.steps == 5
    order = [prompts(one.of_step(step)) for step in range(5)]
    assert [len(step) for step in order] == [4, 4, 4, 4, 4]
    flat = [prompt for step in order for prompt in step]
    assert Counter(flat[:10]) == Counter(flat[10:]) == Counter(f"<bos>{i}+1=?" for i in range(10))
    assert order != [prompts(other.of_step(step)) for step in range(5)]
    assert one.of_step(3) == one.of_step(3)


@settings(max_examples=40, deadline=None)
@given(new=st.integers(4, 9), share=st.sampled_from([0.1, 0.25, 0.5, 0.9]), epochs=st.integers(1, 3))
def test_the_share_of_earlier_pairs_is_kept_and_every_new_pair_is_learned_each_epoch(
    tmp_path_factory: pytest.TempPathFactory, new: int, share: float, epochs: int
) -> None:
    folder = tmp_path_factory.mktemp("replay")
    write(folder, *map(line, range(new)))
    write(folder, *map(line, range(90, 93)), name="earlier.jsonl")
    pairs = pairs_of(folder, epochs=epochs, replay_path=[str(folder / "earlier.jsonl")], replay_share=share)
    learned = [prompt for step in range(pairs.steps) for prompt in prompts(pairs.of_step(step))]
    earlier = [prompt for prompt in learned if prompt.startswith("<bos>9") and prompt != "<bos>9+1=?"]
    rest = Counter(prompt for prompt in learned if prompt not in earlier)
    assert rest == Counter({f"<bos>{i}+1=?": epochs for i in range(new)})
    assert abs(len(earlier) - share * len(learned)) < 1


def test_several_files_are_learned_as_one(tmp_path: Path) -> None:
    files = [write(tmp_path, *map(line, part), name=f"{part[0]}.jsonl") for part in (range(3), range(3, 6))]
    pairs = pairs_of(tmp_path, path=[str(file) for file in files], batch_size=6)
    assert pairs.steps == 1
    assert sorted(prompts(pairs.of_step(0))) == [f"<bos>{i}+1=?" for i in range(6)]


def test_the_identity_is_that_of_the_content_and_of_the_order(tmp_path: Path) -> None:
    write(tmp_path, *map(line, range(5)))
    one = pairs_of(tmp_path).identity
    assert pairs_of(tmp_path).identity == one
    assert pairs_of(tmp_path, seed=1).identity != one
    assert pairs_of(tmp_path, test_size=1).identity != one
    write(tmp_path, *map(line, range(4)), line(4, chosen="6", rejected="5"))
    assert pairs_of(tmp_path).identity != one
