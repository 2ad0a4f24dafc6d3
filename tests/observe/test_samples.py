"""Sample files: one per step, readable line by line whatever the text."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mega.observe.samples import rounded, sample_record, telling, token_texts, write_samples
from grpo_mega.types import Prompt, Sample, Score


@settings(max_examples=25, deadline=None)
@given(texts=st.lists(st.text(), max_size=4))
def test_any_text_survives_one_record_a_line(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    run = tmp_path_factory.mktemp("run")
    records = [{"completion": text + "\ud800\u2028\n", "reward": 1.2} for text in texts]
    path = write_samples(run, 10, records)
    assert path == run / "samples" / "step-000010.jsonl"
    assert [json.loads(line) for line in path.read_text().splitlines()] == records


def test_a_step_that_runs_again_replaces_its_file(tmp_path: Path) -> None:
    write_samples(tmp_path, 3, [{"reward": 0.0}, {"reward": 1.0}])
    path = write_samples(tmp_path, 3, [{"reward": 0.5}])
    assert path.read_text() == '{"reward": 0.5}\n'
    assert [file.name for file in path.parent.iterdir()] == ["step-000003.jsonl"]


@pytest.mark.parametrize("value", [math.nan, object()])
def test_what_json_cannot_hold_is_named_and_nothing_is_written(tmp_path: Path, value: object) -> None:
    with pytest.raises(ValueError, match="sample 1 of step 4"):
        write_samples(tmp_path, 4, [{"reward": 1.0}, {"reward": value}])
    assert list((tmp_path / "samples").iterdir()) == []


def of_bytes(ids: Iterable[int]) -> str:
    """A decoder of tokens that are bytes, as those of byte-level vocabularies that do not know a character."""
    return bytes(ids).decode(errors="replace")


@settings(max_examples=50, deadline=None)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=40))
def test_tokens_of_a_part_of_a_character_spell_the_text_together(text: str) -> None:
    ids = [*text.encode()]
    texts = token_texts(ids, of_bytes)
    assert len(texts) == len(ids)
    assert "".join(texts) == text


@settings(max_examples=50, deadline=None)
@given(ids=st.lists(st.integers(0, 255), max_size=40))
def test_bytes_that_are_no_text_have_as_many_texts(ids: list[int]) -> None:
    texts = token_texts(ids, of_bytes)
    assert len(texts) == len(ids)
    assert all(isinstance(text, str) for text in texts)


def test_a_token_has_what_it_adds_where_a_decoder_drops_the_first_space() -> None:
    words = {1: " two", 2: " words", 3: "."}

    def decode(ids: Iterable[int]) -> str:
        return "".join(words[token] for token in ids).removeprefix(" ")

    assert token_texts([1, 2, 3, 2], decode) == ["two", " words", ".", " words"]


HOSTILE = "\x00\x1b[31m\u202e</script>\ud800\r\n\u2028\x7f"


@pytest.mark.parametrize("text", [HOSTILE, "a" * 2**20, HOSTILE * 2**16])
def test_hostile_text_is_valid_json_on_one_line(tmp_path: Path, text: str) -> None:
    prompt = Prompt(text, (1,), text, text, "task")
    sample = Sample(prompt, 0, array("i", [7, 8]), array("f", [-math.inf, math.nan]), "stop", ((0, 0),), text)
    record = sample_record(sample, Score(1.0, {"accuracy": 1.0}, reason=text), 0, lambda ids: text * len([*ids]))
    path = write_samples(tmp_path, 1, [record, record], "followed")
    content = path.read_bytes()
    assert content.isascii()
    first, second, rest = content.split(b"\n")
    assert (first, rest) == (second, b"")
    assert json.loads(first) == record
    assert (record["token_texts"], record["engine_logprobs"]) == ([text, text], [None, None])


def test_numbers_have_six_decimals_and_what_is_not_finite_is_null() -> None:
    assert rounded([-0.123456789, 1e-9, math.inf, math.nan, -12.3456789]) == [-0.123457, 0.0, None, None, -12.345679]


def group(number: int, *rewards: float | None) -> list[dict[str, object]]:
    return [{"group": number, "sample": index, "reward": reward} for index, reward in enumerate(rewards)]


def test_the_best_and_the_worst_of_the_group_that_differs_most_are_telling() -> None:
    records = [*group(0, 0.5, 0.6), *group(1, 0.2, None, 1.0, 0.0), *group(2, 1.0, 1.0)]
    chosen = [(how, record["group"], record["sample"]) for how, record in telling(records)]
    assert chosen == [("best of 3", 1, 2), ("worst of 3", 1, 3)]


@pytest.mark.parametrize("records", [group(0, 1.0, 1.0), [*group(0, None, None), *group(1, 1.0)]])
def test_where_all_are_equal_the_first_is_shown(records: list[dict[str, object]]) -> None:
    assert telling(records) == [("first of 2", records[0])]


def test_of_no_samples_none_is_telling() -> None:
    assert telling([]) == []
