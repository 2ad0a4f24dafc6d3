"""Tiny programs: answers that pass their own tests and no others, disjoint splits, documents in the promised shares."""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from composed import composed
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from grpo_mega.config.schema import DataConfig
from grpo_mega.data import build_data
from grpo_mega.data.tasks.tiny_code import ORIGINS, SLOPES, TinyCode, hidden_tests, program
from grpo_mega.data.tokenizer import character_tokenizer
from grpo_mega.reward.code import code_score
from grpo_mega.types import Prompt, Sample

TOKENIZER = character_tokenizer(DataConfig(task="tiny_code"))
TASK = TinyCode(TOKENIZER, validation_size=150, test_size=300)

functions = st.tuples(st.sampled_from(SLOPES), st.sampled_from(SLOPES), st.sampled_from(ORIGINS))


def values_of(text: str) -> tuple[int, int, int]:
    """f(0,0), f(1,0) and f(0,1), read from a problem's text."""
    match = re.match(r"<bos>f\(0,0\)=(\d+);f\(1,0\)=(\d+);f\(0,1\)=(\d+)\?", text)
    assert match is not None
    origin, x, y = map(int, match.groups())
    return origin, x, y


def kin(text: str) -> tuple[int, int, int]:
    """A problem without the order of x and y."""
    origin, *others = values_of(text)
    return origin, min(others), max(others)


def defined_by(source: str) -> Callable[[int, int], int]:
    """The function that a reference program defines."""
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    return namespace["f"]


def completion(prompt: Prompt, text: str) -> Sample:
    tokens = TOKENIZER.encode(text)
    return Sample(prompt, 0, array("i", tokens), array("f", bytes(4 * len(tokens))), "stop", ((0, 0),), text)


@given(st.integers(0, 2**40), st.integers(0, 2**40))
def test_the_answer_has_the_values_of_the_question_and_of_the_hidden_tests(seed: int, k: int) -> None:
    prompt = TASK.problem(seed, k)
    f = defined_by(prompt.answer)
    assert values_of(prompt.text) == (f(0, 0), f(1, 0), f(0, 1))
    tests = prompt.metadata["tests"]
    assert tests == [{"call": "f", "args": t["args"], "returns": f(*t["args"])} for t in tests]
    assert len(tests) == 2
    assert TOKENIZER.encode(prompt.text) == list(prompt.token_ids)
    assert prompt == TASK.problem(seed, k)
    assert prompt.id != TASK.problem(seed, k + 1).id


@settings(max_examples=30)
@given(functions)
def test_no_other_function_passes_a_test(function: tuple[int, int, int]) -> None:
    for test in hidden_tests(function):
        x, y = test["args"]
        passing = [(a, b, c) for a, b, c in product(SLOPES, SLOPES, ORIGINS) if a * x + b * y + c == test["returns"]]
        assert passing == [function]


@settings(max_examples=10)
@given(functions)
def test_the_sandbox_pays_for_the_answer_in_tags_and_for_nothing_less(function: tuple[int, int, int]) -> None:
    a, b, c = function
    text = f"<bos>f(0,0)={c};f(1,0)={a + c};f(0,1)={b + c}?"
    prompt = Prompt("p", (1,), text, program(function), "tiny_code", {"tests": hidden_tests(function)})
    answers = {
        f"<answer>{program(function)}</answer>": 1.0,
        f"<think>{a + c}-{c}={a}</think><answer>{program(function)}</answer>": 1.0,
        program(function): 0.0,
        f"<answer>{program((a, b, c + 1))}</answer>": 0.0,
        f"<answer>def f(x,y):return {a + c}*x+{c}</answer>": 0.0,
    }
    assert {text: code_score(completion(prompt, text)).value for text in answers} == answers


def test_splits_share_no_function_however_its_numbers_are_called() -> None:
    validation, test = ({kin(p.text) for p in split} for split in (TASK.validation, TASK.test))
    train = {kin(TASK.problem(seed, k).text) for seed in range(2) for k in range(3000)}
    assert (len(validation), len(test)) == (150, 300)
    assert not validation & test
    assert not train & (validation | test)
    assert len(train) == 450
    assert {p.id.split("/")[1] for p in TASK.test} == {"test"}


def test_documents_leave_the_held_out_problems_alone() -> None:
    held_out = {kin(p.text) for p in TASK.validation + TASK.test}
    documents = [TOKENIZER.decode(ids) for ids in TASK.documents(0, 0, 3000, 0.1, 0.25)]
    assert not held_out & {kin(text) for text in documents}


def test_splits_are_the_same_for_ever() -> None:
    """A changed generator would silently change what every reported accuracy means."""
    prompts = [*TASK.test, *TASK.validation, *(TASK.problem(0, k) for k in range(100))]
    shown = json.dumps([[p.id, p.text, p.metadata] for p in prompts])
    assert hashlib.sha256(shown.encode()).hexdigest()[:16] == "5de8b9fa7730f80c"
    assert TinyCode(TOKENIZER, validation_size=10, test_size=300).test == TASK.test


def kind(document: str) -> str:
    """Tagged, direct or working, checking on the way that values and program are right."""
    question, _, solution = document.partition("?")
    origin, x, y = values_of(f"{question}?")
    answer = program((x - origin, y - origin, origin))
    worked = [f"{x}-{origin}={x - origin}", f"{y}-{origin}={y - origin}"]
    assert solution.removesuffix("<eos>").count("<eos>") == 0
    if solution == f"{answer}<eos>":
        return "direct"
    if solution == f"{';'.join(worked)};{answer}<eos>":
        return "working"
    thoughts = ["", *(f"<think>{';'.join(worked[:n])}</think>" for n in (1, 2))]
    return f"tagged {[f'{thought}<answer>{answer}</answer><eos>' for thought in thoughts].index(solution)}"


def test_base_documents_come_in_the_configured_shares() -> None:
    documents = [TOKENIZER.decode(ids) for ids in TASK.documents(3, 7, 4000, tagged=0.1, direct=0.25)]
    shares = {name: count / 4000 for name, count in Counter(map(kind, documents)).items()}
    expected = {"working": 0.675, "direct": 0.225, "tagged 0": 0.05, "tagged 1": 0.03, "tagged 2": 0.02}
    assert shares == pytest.approx(expected, abs=0.03)
    assert shares.keys() == expected.keys()
    assert max(map(len, map(TOKENIZER.encode, documents))) <= TASK.longest_document()


def test_no_document_is_longer_than_the_longest() -> None:
    documents = TASK.documents(0, 0, 3000, tagged=0.9, direct=0.0)
    assert max(map(len, documents)) == TASK.longest_document()


def test_documents_are_functions_of_seed_and_step() -> None:
    assert TASK.documents(0, 5, 64, 0.1, 0.25)[:8] == TASK.documents(0, 5, 8, 0.1, 0.25)
    assert TASK.documents(0, 5, 8, 0.1, 0.25) != TASK.documents(0, 6, 8, 0.1, 0.25)
    assert TASK.documents(0, 5, 8, 0.1, 0.25) != TASK.documents(1, 5, 8, 0.1, 0.25)


def test_the_gate_starts_the_working_that_documents_hold() -> None:
    for prompt in TASK.validation[:20]:
        started = TASK.working_prompt(prompt)
        assert TOKENIZER.encode(started.text) == list(started.token_ids)
        assert started.id != prompt.id
        origin, x, y = values_of(prompt.text)
        full = f"{prompt.text}{x}-{origin}={x - origin};{y}-{origin}={y - origin};{prompt.answer}"
        rest = full.removeprefix(started.text)
        assert full.startswith(started.text)
        assert TASK.is_worked_out(started, rest)
        for wrong in (rest.replace("*y", "*x"), f"{rest};", rest[:-1], "", prompt.text):
            assert not TASK.is_worked_out(started, wrong)


def test_half_of_the_functions_are_left_for_training() -> None:
    TinyCode(TOKENIZER, 150, 300)
    with refused("validation_size + data.test_size | has 900 functions"):
        TinyCode(TOKENIZER, 151, 300)


def test_a_run_reads_the_task_that_its_experiment_names() -> None:
    config = composed("experiment=tiny_code", "run.seed=3")
    data = build_data(config)
    assert (data.validation, data.test) == (TASK.validation, TASK.test)
    assert data.train.take(2) == [TASK.problem(3, k) for k in range(2)]
    config.model.context = TASK.longest_document() - 1
    with refused(f"model.context={config.model.context} | of up to {TASK.longest_document()} tokens"):
        build_data(config)
