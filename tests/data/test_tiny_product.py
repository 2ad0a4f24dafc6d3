"""Products: right answers, disjoint splits, documents in the promised shares, calls that the calculator answers."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter

import pytest
import without_waiting
from composed import composed
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from grpo_mega.config.schema import DataConfig
from grpo_mega.data import build_data
from grpo_mega.data.tasks.tiny_product import FACTORS, TinyProduct, call
from grpo_mega.data.tokenizer import character_tokenizer

TOKENIZER = character_tokenizer(DataConfig(task="tiny_product"))
TASK = TinyProduct(TOKENIZER, validation_size=200, test_size=400)


def factors_of(text: str) -> tuple[int, int]:
    """The factors of a problem, read from its text."""
    match = re.match(r"<bos>(\d\d)\*(\d\d)=\?", text)
    assert match is not None
    return int(match[1]), int(match[2])


def kin(text: str) -> tuple[int, ...]:
    """A problem without the order of its factors."""
    return tuple(sorted(factors_of(text)))


@given(st.integers(0, 2**40), st.integers(0, 2**40))
def test_the_answer_is_the_product(seed: int, k: int) -> None:
    prompt = TASK.problem(seed, k)
    a, b = factors_of(prompt.text)
    assert int(prompt.answer) == a * b
    assert TOKENIZER.encode(prompt.text) == list(prompt.token_ids)
    assert prompt == TASK.problem(seed, k)
    assert prompt.id != TASK.problem(seed, k + 1).id


def test_splits_share_no_product_whatever_the_order_of_its_factors() -> None:
    validation, test = ({kin(p.text) for p in split} for split in (TASK.validation, TASK.test))
    train = {kin(TASK.problem(seed, k).text) for seed in range(2) for k in range(10000)}
    documents = {kin(TOKENIZER.decode(ids)) for ids in TASK.documents(0, 0, 3000, 0.1, 0.25)}
    assert (len(validation), len(test)) == (200, 400)
    assert not validation & test
    assert not (train | documents) & (validation | test)
    assert len(train) > 0.95 * (len(FACTORS) * (len(FACTORS) + 1) / 2 - 600)
    assert {p.id.split("/")[1] for p in TASK.test} == {"test"}


def test_splits_are_the_same_for_ever() -> None:
    """A changed generator would silently change what every reported accuracy means."""
    prompts = [*TASK.test, *TASK.validation, *(TASK.problem(0, k) for k in range(100))]
    shown = json.dumps([[p.id, p.text, p.answer] for p in prompts])
    assert hashlib.sha256(shown.encode()).hexdigest()[:16] == "394b7ab06dc50f9b"
    assert TinyProduct(TOKENIZER, validation_size=10, test_size=400).test == TASK.test


def kind(document: str) -> str:
    """The kind of a base document, checking on the way that what it says is right."""
    question, _, solution = document.partition("?")
    a, b = factors_of(f"{question}?")
    kinds = {
        f"{a * b}<eos>": "direct",
        f"{a}*{b}={a * b};{a * b}<eos>": "working",
        f"<think>{a}*{b}={a * b}</think><answer>{a * b}</answer><eos>": "tagged",
        f"<think>[{a}*{b}]{a * b};</think><answer>{a * b}</answer><eos>": "called",
    }
    return kinds[solution]


def test_base_documents_come_in_the_configured_shares() -> None:
    documents = [TOKENIZER.decode(ids) for ids in TASK.documents(3, 7, 10000, tagged=0.2, direct=0.25)]
    shares = {name: count / 10000 for name, count in Counter(map(kind, documents)).items()}
    expected = {"working": 0.6, "direct": 0.2, "tagged": 0.17, "called": 0.03}
    assert shares == pytest.approx(expected, abs=0.01)
    assert max(map(len, map(TOKENIZER.encode, documents))) == TASK.longest_document()


def test_documents_are_functions_of_seed_and_step() -> None:
    assert TASK.documents(0, 5, 64, 0.1, 0.25)[:8] == TASK.documents(0, 5, 8, 0.1, 0.25)
    assert TASK.documents(0, 5, 8, 0.1, 0.25) != TASK.documents(0, 6, 8, 0.1, 0.25)
    assert TASK.documents(0, 5, 8, 0.1, 0.25) != TASK.documents(1, 5, 8, 0.1, 0.25)


@given(st.sampled_from(FACTORS), st.sampled_from(FACTORS))
def test_documents_show_calls_as_the_experiment_s_calculator_answers_them(a: int, b: int) -> None:
    environment = composed("experiment=tiny_tool").environment
    content, end, rest = call((a, b)).removeprefix(environment.open).partition(environment.close)
    reply = without_waiting.reply({}, "key", "seed", [content], str(environment.path), longest=100)
    assert end
    assert not reply["error"]
    assert rest == environment.reply.format(reply=reply["text"])


def test_the_gate_starts_the_working_that_documents_hold_and_wants_it_copied() -> None:
    for prompt in TASK.validation[:20]:
        started = TASK.working_prompt(prompt)
        a, b = factors_of(prompt.text)
        assert started.text == f"{prompt.text}{a}*"
        assert TOKENIZER.encode(started.text) == list(started.token_ids)
        assert started.id != prompt.id
        for copied in (f"{b}={a * b};{a * b}", f"{b}=1;1"):
            assert TASK.is_worked_out(started, copied)
        for wrong in (f"{b}=1;2", f"{b + 1}=1;1", f"{b}=1;1;", f"{b}=;", "", prompt.text):
            assert not TASK.is_worked_out(started, wrong)


def test_half_of_the_products_are_left_for_training() -> None:
    TinyProduct(TOKENIZER, 1000, 1047)
    with refused("validation_size + data.test_size | has 4095 products"):
        TinyProduct(TOKENIZER, 1000, 1048)


def test_a_run_reads_the_task_that_its_experiment_names() -> None:
    config = composed("experiment=tiny_tool", "run.seed=3")
    data = build_data(config)
    assert (data.validation, data.test) == (TASK.validation, TASK.test)
    assert data.train.take(2) == [TASK.problem(3, k) for k in range(2)]
    config.model.context = TASK.longest_document() - 1
    with refused(f"model.context={config.model.context} | of up to {TASK.longest_document()} tokens"):
        build_data(config)
